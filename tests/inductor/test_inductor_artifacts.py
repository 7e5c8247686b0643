"""Real Inductor on the CPU: the artifact's text, guards and kernels, and that it runs like the piece's text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from piecework.compilers.inductor import InductorCompiler
from piecework.errors import CompileError, Incompatible
from piecework.seam.loader import load, load_library
from piecework.values.artifact import INDUCTOR, TEXT, TORCH, Artifact
from piecework.values.digest import digest_bytes
from piecework.values.shapes import Range
from toy_pieces import MIDDLE, PIECES, UNINITIALISED, inputs_for, write_piece

Artifacts = dict[tuple[str, int], Artifact]
KernelWriter = Callable[[Artifact], Callable[[str], Path]]
GOLDEN = Path(__file__).parents[1] / "golden" / "stripped"


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result - wanted).norm() / wanted.norm().clamp_min(1e-30))


@pytest.mark.parametrize(("name", "low", "size"), [(n, 2, s) for n in PIECES for s in (2, 7, 300)] + [("middle", 1, 1)])
def test_results_are_those_of_the_text(
    artifacts: Artifacts, write_kernels: KernelWriter, name: str, low: int, size: int
) -> None:
    artifact = artifacts[name, low]
    called, weights = inputs_for(PIECES[name], {"s0": size})
    expected = load(Artifact(TEXT, PIECES[name]), kernel_path=Path).bind(weights)(*called)
    results = load(artifact, kernel_path=write_kernels(artifact)).bind(weights)(*called)
    assert isinstance(results, tuple)
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        if index not in UNINITIALISED[name]:
            assert relative_error(result, wanted) < 1e-5


@pytest.mark.parametrize("key", [("first", 2), ("middle", 2), ("last", 2), ("middle", 1)])
def test_the_text_is_what_runs_and_no_more(
    artifacts: Artifacts, key: tuple[str, int], compare_golden: Callable[[Path, str], None]
) -> None:
    artifact = artifacts[key]
    assert artifact.kind == INDUCTOR
    # Kernels are named by what Inductor fused; their number is part of the text, so the names are too.
    # Up to how many rows a kernel of our own multiplies depends on the processor.
    text = re.sub(r"<= \d+ else ", "<= MOST else ", artifact.text)
    compare_golden(GOLDEN / f"{key[0]}_{key[1]}.txt", text)


def test_outputs_of_two_calls_are_the_callers_own(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    artifact = artifacts["middle", 2]
    piece = load(artifact, kernel_path=write_kernels(artifact)).bind(inputs_for(MIDDLE, {"s0": 4})[1])
    first = piece(*inputs_for(MIDDLE, {"s0": 4}, seed=1)[0])
    kept = [value.clone() for value in first]
    piece(*inputs_for(MIDDLE, {"s0": 4}, seed=2)[0])
    assert all(torch.equal(value, copy) for value, copy in zip(first, kept, strict=True))


def test_no_path_of_this_machine_is_in_an_artifact(artifacts: Artifacts) -> None:
    for artifact in artifacts.values():
        data = b"\0".join([artifact.text.encode(), json.dumps(artifact.facts).encode(), *artifact.kernels.values()])
        for folder in {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parent), "/tmp", str(Path.home())}:
            assert folder.encode() not in data, folder
        assert re.findall(rb"/[\w./-]*\.(?:cpp|h)\b", data.replace(b"torch/include/torch/csrc/inductor", b"")) == [
            b"/cpp_prefix.h"
        ] * data.count(b"cpp_prefix.h")
        assert all(len(kernel) < 30_000 for kernel in artifact.kernels.values())


def test_equal_pieces_give_equal_texts(artifacts: Artifacts) -> None:
    again = InductorCompiler(threads=1).compile(MIDDLE, {"s0": Range(2, 8192)})
    assert again.text == artifacts["middle", 2].text
    assert again.facts == artifacts["middle", 2].facts
    assert list(again.kernels) == list(artifacts["middle", 2].kernels)


def test_loading_needs_no_compiler(artifacts: Artifacts, write_kernels: KernelWriter, tmp_path: Path) -> None:
    """Load all pieces in a fresh process with an empty PATH: nothing is started, no compiler is imported."""
    for number, artifact in enumerate(artifacts.values()):
        folder = write_kernels(artifact)("")
        entry = {"kind": artifact.kind, "text": artifact.text, "facts": artifact.facts}
        (tmp_path / f"{number}.json").write_text(json.dumps(entry | {"names": list(artifact.kernels)}))
        for name, data in artifact.kernels.items():
            (tmp_path / f"{number}.{name}").write_bytes(data)
    script = """
import json, sys
from pathlib import Path
started = []
kinds = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "pty.spawn")
sys.addaudithook(lambda kind, values: started.append(kind) if kind in kinds else None)
import torch
from piecework.seam.loader import load
from piecework.values.artifact import Artifact
here, kernels = Path(sys.argv[1]), Path(sys.argv[2])
for path in sorted(here.glob("*.json")):
    entry = json.loads(path.read_text())
    data = {name: (here / f"{path.stem}.{name}").read_bytes() for name in entry["names"]}
    artifact = Artifact(entry["kind"], entry["text"], data, (), entry["facts"])
    loaded = load(artifact, kernel_path=lambda digest: kernels / digest)
    loaded.bind([torch.randn(64, 64) for _ in entry["facts"]["weights"]])
print(json.dumps({"started": started, "imported": [m for m in (
    "torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "sympy", "triton",
    "torch.fx.experimental.symbolic_shapes") if m in sys.modules]}))
"""
    environment = {"PATH": "", "PYTHONPATH": ":".join(p for p in sys.path if p.endswith("src"))}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"started": [], "imported": []}


SOFTMAX = """\
def piece(
    s0: "int",
    x0: "float32[s0, 64] cpu",
    w0: "weight float32[64, 64] cpu",
):
    v0 = torch.matmul(x0, w0)
    v1 = torch.nn.functional.softmax(v0, 0)
    return (v1,)
"""


@pytest.mark.parametrize(
    ("size", "guards"),
    [(Range(2, 8192), ("s0 <= 4096",)), (Range(4097, 8192), ()), (Range(1, 64), ("s0 >= 2",)), (Range(9, 9), ())],
)
def test_what_the_compile_assumed_is_recorded(size: Range, guards: tuple[str, ...]) -> None:
    assert InductorCompiler(threads=1).compile(SOFTMAX, {"s0": size}).guards == guards


def test_output_that_the_loader_does_not_know_falls_back_loudly(write_kernels: KernelWriter) -> None:
    text = write_piece(
        {"x0": "float32[4, 8] cpu"},
        "v0 = x0.transpose_(0, 1)",
        "v1 = operator.mul(v0, 2)",
        "return (v1,)",
    )
    artifact = InductorCompiler(threads=1).compile(text, {})
    assert artifact.kind == TORCH
    assert artifact.facts["fall_back"] == "the piece needs AOTAutograd's wrapper: it writes to inputs after the graph"
    value = torch.randn(4, 8)
    wanted = value.t() * 2
    (result,) = load(artifact, kernel_path=write_kernels(artifact)).bind([])(value)
    assert torch.equal(result, wanted)
    assert value.shape == (8, 4)


def test_an_input_written_to_is_written_to(write_kernels: KernelWriter) -> None:
    text = write_piece(
        {"x0": "float32[8] cpu"},
        "v0 = x0.add_(1)",
        "v1 = operator.mul(v0, 2)",
        "return (v1,)",
    )
    artifact = InductorCompiler(threads=1).compile(text, {})
    assert artifact.kind == INDUCTOR
    value = torch.arange(8.0)
    (result,) = load(artifact, kernel_path=write_kernels(artifact)).bind([])(value)
    assert torch.equal(value, torch.arange(8.0) + 1)
    assert torch.equal(result, (torch.arange(8.0) + 1) * 2)


LIBRARY = """\
def piece(
    s0: "int",
    x0: "float32[s0, 8] cpu",
):
    v0 = torch.topk(x0, 2)
    v1 = operator.getitem(v0, 0)
    v2 = operator.getitem(v0, 1)
    v3 = torch.cumsum(x0, 0)
    v4 = torch.tensor([1.0, float("inf"), -2.5])
    return (v1, v2, v3, v4)
"""


def test_operators_without_a_kernel_are_torchs_own(write_kernels: KernelWriter) -> None:
    artifact = InductorCompiler(threads=1).compile(LIBRARY, {"s0": Range(2, 64)})
    assert artifact.kind == INDUCTOR
    assert "aten_topk_default = torch.ops.aten.topk.default" in artifact.text
    value = torch.randn(5, 8)
    results = load(artifact, kernel_path=write_kernels(artifact)).bind([])(5, value)
    assert torch.equal(results[0], value.topk(2).values)
    assert torch.equal(results[1], value.topk(2).indices)
    assert torch.allclose(results[2], value.cumsum(0))
    assert results[3].tolist() == [1.0, float("inf"), -2.5]


def test_a_view_of_an_input_stays_a_view(write_kernels: KernelWriter) -> None:
    text = write_piece(
        {"s0": "int", "x0": "float32[s0, 8] cpu"},
        "v0 = x0.view(s0, 2, 4)",
        "v1 = operator.mul(x0, 2)",
        "return (v0, v1, x0)",
    )
    artifact = InductorCompiler(threads=1).compile(text, {"s0": Range(2, 64)})
    value = torch.randn(3, 8)
    results = load(artifact, kernel_path=write_kernels(artifact)).bind([])(3, value)
    assert results[0].data_ptr() == value.data_ptr()
    assert results[0].shape == (3, 2, 4)
    assert results[2] is value
    assert torch.equal(results[1], value * 2)


def test_an_artifact_of_another_machine_is_refused(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    artifact = artifacts["last", 2]
    facts = artifact.facts | {"machine": artifact.facts["machine"] | {"flags": "sse quantum_foam"}}
    with pytest.raises(Incompatible, match="built for processor features `quantum_foam`"):
        load(Artifact(INDUCTOR, artifact.text, artifact.kernels, (), facts), kernel_path=write_kernels(artifact))


def test_a_piece_that_does_not_compile_names_its_range() -> None:
    text = write_piece(
        {"s0": "int", "x0": "float32[s0, 8] cpu"},
        "v0 = torch.linalg.eigvals(x0)",
        "return (v0,)",
    )
    with pytest.raises(CompileError) as caught:
        InductorCompiler(threads=1).compile(text, {"s0": Range(2, 64)})
    assert "s0=2-64" in str(caught.value)


def test_the_version_names_what_decides_the_code() -> None:
    plain = InductorCompiler(threads=3).version
    assert plain == f"format=5 torch={torch.__version__} threads=3"
    assert InductorCompiler(threads=3, options={"max_autotune": True}).version != plain


def test_a_piece_has_one_library_with_an_entry_for_each_kernel(artifacts: Artifacts) -> None:
    artifact = artifacts["middle", 2]
    assert list(artifact.kernels) == ["few_rows", "kernels"]
    assert len(artifact.facts["entries"]) == 3
    assert all(f"{entry}(" in artifact.text for entry in artifact.facts["entries"])


def test_a_kernel_says_what_it_was_given_wrongly(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    artifact = artifacts["middle", 2]
    library = load_library(write_kernels(artifact)(digest_bytes(artifact.kernels["kernels"])))
    silu = getattr(library, next(entry for entry in artifact.facts["entries"] if "silu" in entry))
    with pytest.raises(RuntimeError, match="takes 3 arguments"):
        silu(torch.ones(2, 64), 2)
    with pytest.raises(TypeError):
        silu(torch.ones(2, 64), torch.ones(2, 32), "two")


def test_a_cpp_compiler_that_is_absent_is_named(tmp_path: Path) -> None:
    script = """
import torch
from piecework.compilers.inductor import InductorCompiler
from piecework.errors import CompileError
text = 'def piece(\\n    x0: "float32[9] cpu",\\n):\\n    v0 = torch.sin(x0)\\n    return (v0,)\\n'
try:
    InductorCompiler(threads=1).compile(text, {})
except CompileError as error:
    print(error)
"""
    environment = {"PATH": str(tmp_path), "PYTHONPATH": ":".join(p for p in sys.path if p), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "the compiler failed for range `static`" in done.stdout, done.stderr
    assert (
        "hint: Inductor builds CPU kernels with a C++ compiler and none is found: install g++, or set CXX"
        in done.stdout
    )


def test_a_compiler_that_lacks_what_the_processor_has_is_asked(tmp_path: Path) -> None:
    """A C++ compiler that refuses the first source: the probes are run, and the piece is built by what they found."""
    compiler = tmp_path / "g++"
    log = tmp_path / "log"
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >> {log}\n'
        'case "$*" in *amx*) echo "error: unrecognized option -mamx-tile" >&2; exit 1;; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    script = """
import torch
from piecework.compilers.inductor import InductorCompiler
text = 'def piece(\\n    x0: "float32[9] cpu",\\n):\\n    v0 = torch.sin(x0)\\n    return (v0,)\\n'
artifact = InductorCompiler(threads=1).compile(text, {})
print(artifact.kind, "amx" in artifact.facts["isa"])
"""
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["inductor", "False"], done.stderr
    assert "kernels.cpp" in log.read_text()
