"""The examples run as their first lines say, and print what they promise."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from house.source_tree import ROOT
from tiny_models import tiny_folder, tiny_model

EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: str | Path, launcher: tuple[str, ...] = ()) -> str:
    """Run an example in a process of its own; return what it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIECEWORK_")}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:piecework", *launcher, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True, text=True, timeout=900, check=False, env=kept | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'run_example("{example.name}"' in text, f"{example.name} is run by no test"


def test_an_operator_of_ones_own() -> None:
    lines = run_example("opaque_op.py").splitlines()
    assert lines[0].startswith("opcheck: both operators")
    assert [line.split(": ")[1].split(" of ")[0] for line in lines if "one graph" in line] == ["one graph", "one graph"]
    assert "`example.soft_cap` is one of them" in lines[1].replace(".default", "")
    assert "`example.append` is one of them" in lines[4].replace(".default", "")
    assert "cut there into 3 regions, 1 of them opaque" in lines[2]
    assert "cut there into 3 regions, 1 of them opaque" in lines[5]
    assert [line for line in lines if "give what the model gives" in line] == [lines[3], lines[6]]


def test_operators() -> None:
    lines = run_example("operators.py").splitlines()
    assert lines[0] == "custom_ops none: nothing is looked for"
    counts = "'find_norms': 2, 'find_gates': 1, 'fuse_add_norm': 1, 'use_operators': 3"
    assert lines[1] == f"custom_ops all: {{{counts}}}"
    assert "custom_ops none,+rms_norm: {'find_norms': 2, 'use_operators': 2}" in lines
    assert lines.count("  counting_norm ran") >= 2
    assert lines[-1] == "each gives what the model gives"


def test_a_pass_of_ones_own() -> None:
    lines = run_example("custom_pass.py").splitlines()
    assert lines[:2] == ["square_as_product, version 1: 1 match", "it gives what the model gives"]
    assert lines[2].startswith("refused: pass `half_result` broke the graph: result 0 is `float16[tokens] cpu`")


def test_an_engine_loop_of_ones_own(tmp_path: Path) -> None:
    folder, prompts = tiny_folder("llama", tmp_path / "model"), ([5, 6, 7], [8, 9], [10, 11, 12, 13])
    asked = [",".join(map(str, prompt)) for prompt in prompts]
    lines = run_example("engine_loop.py", folder, *asked).splitlines()
    assert lines[2] == "step 2: 6 tokens of 3 requests"
    model = tiny_model("llama")
    for prompt, name, line in zip(prompts, asked, lines[-3:], strict=True):
        said = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                said.append(int(model(torch.tensor([said]), use_cache=False).logits[0, -1].argmax()))
        assert line == f"{name}: {','.join(map(str, said[len(prompt) :]))}"


def test_a_model_of_ones_own() -> None:
    text = run_example("own_model.py", "--compiler", "eager")
    assert "9 regions, 5 sites, 3 distinct pieces" in text
    assert "compiled 9 artifacts" in text
    assert "loaded 9 artifacts by key, compiled 0" in text
    answers = [line.partition(" gives ")[2].strip() for line in text.splitlines() if " gives " in line]
    assert len(answers) == 2
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_model_of_ones_own_under_inductor() -> None:
    assert "loaded 9 artifacts by key, compiled 0" in run_example("own_model.py")


def test_a_warm_start(tmp_path: Path) -> None:
    first = run_example("warm_start.py", tmp_path / "store").splitlines()
    assert first[0] == "record found: no, traced: yes"
    assert first[1] == "compiled 2, loaded 2"
    assert "torch._inductor" in first[2]
    second = run_example("warm_start.py", tmp_path / "store").splitlines()
    assert second[0] == "record found: yes, traced: no"
    assert second[1] == "compiled 0, loaded 2"
    assert second[2] == "imported of the compiler: nothing"


def test_several_ranks(tmp_path: Path) -> None:
    """Run by torchrun as its first lines say; the module is what the command `torchrun` runs."""
    model = tiny_folder("llama", tmp_path / "llama")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}")
    text = run_example("several_ranks.py", model, tmp_path / "store", launcher=launcher)
    # Two ranks that print at once may share a line.
    started = sorted(re.findall(r"rank \d: the program was built on rank 0; compiled \d", text))
    assert started == [f"rank {rank}: the program was built on rank 0; compiled {6 * (1 - rank)}" for rank in (0, 1)]
    answers = re.findall(r"rank \d: (\[[][\d, ]*\])", text)
    assert (len(answers), len(set(answers))) == (4, 2), "each rank has the same two"
