"""Pieces on a CUDA device: Triton's kernels launched without Triton give what the text gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piecework.compilers.inductor import InductorCompiler
from piecework.seam.loader import load
from piecework.values.artifact import INDUCTOR, TEXT, Artifact
from piecework.values.digest import digest_bytes
from piecework.values.shapes import Range
from toy_pieces import PIECES, UNINITIALISED, inputs_for

pytestmark = pytest.mark.gpu
CUDA = {name: text.replace(' cpu"', ' cuda"') for name, text in PIECES.items()}


@pytest.fixture(scope="module")
def artifacts() -> dict[str, Artifact]:
    with InductorCompiler() as compiler:
        return {name: compiler.compile(text, {"s0": Range(2, 8192)}) for name, text in CUDA.items()}


def to_device(values: list[object]) -> list[object]:
    return [value.cuda() if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("size", [2, 7, 500])
def test_results_are_those_of_the_text(
    artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory, name: str, size: int
) -> None:
    artifact = artifacts[name]
    assert artifact.kind == INDUCTOR, artifact.facts.get("fall_back")
    folder = tmp_path_factory.mktemp("kernels")
    for data in artifact.kernels.values():
        (folder / digest_bytes(data)).write_bytes(data)
    called, weights = inputs_for(CUDA[name], {"s0": size})
    called, own = to_device(called), to_device(list(weights))
    expected = load(Artifact(TEXT, CUDA[name]), kernel_path=Path).bind(own)(*called)
    results = load(artifact, kernel_path=lambda digest: folder / digest).bind(own)(*called)
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert (result.shape, result.dtype, result.device) == (wanted.shape, wanted.dtype, wanted.device)
        if index not in UNINITIALISED[name]:
            assert torch.allclose(result, wanted, rtol=2e-4, atol=2e-5)


def test_loading_needs_neither_triton_nor_a_compiler(artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    artifact = artifacts["middle"]
    for data in artifact.kernels.values():
        (tmp_path / digest_bytes(data)).write_bytes(data)
    digests = {name: digest_bytes(data) for name, data in artifact.kernels.items()}
    entry = {"text": artifact.text, "facts": artifact.facts, "kernels": digests}
    (tmp_path / "artifact.json").write_text(json.dumps(entry))
    script = """
import json, sys
from pathlib import Path
started = []
sys.addaudithook(lambda kind, values: started.append(kind) if kind in ("subprocess.Popen", "os.posix_spawn") else None)
import torch
from piecework.seam.loader import load
from piecework.values.artifact import Artifact
folder = Path(sys.argv[1])
entry = json.loads((folder / "artifact.json").read_text())
kernels = {name: (folder / digest).read_bytes() for name, digest in entry["kernels"].items()}
artifact = Artifact("inductor", entry["text"], kernels, (), entry["facts"])
loaded = load(artifact, kernel_path=lambda digest: folder / digest)
shapes = [(16, 16), (16,), (64, 16), (16, 32), (16,), (32, 16)]
piece = loaded.bind([torch.randn(*shape, device="cuda") for shape in shapes])
piece(3, *(torch.randn(3, *rest, device="cuda") for rest in ((4, 4), (16,), (1, 2), (1, 2))))
torch.cuda.synchronize()
imported = [name for name in ("torch._inductor", "torch._dynamo", "triton") if name in sys.modules]
print(json.dumps({"started": started, "imported": imported}))
"""
    environment = {"PATH": "", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"started": [], "imported": []}
