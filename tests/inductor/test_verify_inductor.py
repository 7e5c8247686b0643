"""Verification and cutting with the real compiler: its artifacts hold, and what it assumes of sizes cuts the box."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework.events import ArtifactCompiled, FallBack, RangeSplit, Recorder, VerificationFailed, Verified
from piecework.stages.find import read_program
from piecework.stages.verify import Verification
from piecework.values.artifact import Artifact
from piecework.values.shapes import Range
from piecework.values.verdict import FAILED, HELD
from toy_pieces import PIECES

Artifacts = dict[tuple[str, int], Artifact]
KernelWriter = Callable[[Artifact], Callable[[str], Path]]


@pytest.mark.parametrize("key", [("first", 2), ("middle", 2), ("last", 2), ("middle", 1)])
def test_what_the_compiler_makes_holds(artifacts: Artifacts, write_kernels: KernelWriter, key: tuple[str, int]) -> None:
    artifact = artifacts[key]
    box = {"s0": Range(1, 1) if key[1] == 1 else Range(2, 8192)}
    verdict = Verification(write_kernels(artifact))(0, PIECES[key[0]], box, artifact)
    assert (verdict.outcome, verdict.reason) == (HELD, "")
    assert list(verdict.facts["errors"]) == (["s0=1"] if key[1] == 1 else ["s0=2", "s0=33", "s0=512"])
    assert max(error for found in verdict.facts["errors"].values() for error in found if error is not None) < 1e-6


def test_another_pieces_artifact_does_not_hold(artifacts: Artifacts, write_kernels: KernelWriter) -> None:
    artifact = artifacts["middle", 2]
    text = PIECES["middle"].replace("1e-05", "1e-01", 1)
    verdict = Verification(write_kernels(artifact))(0, text, {"s0": Range(2, 8192)}, artifact)
    assert verdict.outcome == FAILED and "is off by" in verdict.reason


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 0) * 2


@pytest.mark.slow
def test_what_the_compiler_assumes_of_sizes_cuts_the_box() -> None:
    """Softmax over rows, judged at 16 of them: the compiler takes it for granted that there are at most 4096."""
    store, recorder = pw.MemoryStore(), Recorder()
    options = pw.CompileOptions(compiler="inductor", ranges=((1, 8192),))
    program = pw.compile(
        Softmax(), (torch.randn(5, 64),), dynamic={"x": {0: "tokens"}}, options=options, store=store, observer=recorder
    )
    (split,) = recorder.of(RangeSplit)
    assert split.parts == ("s0=2-4096", "s0=4097-8192")
    assert list(read_program(program.key, store).ranges["tokens"]) == ["1", "2-4096", "4097-8192"]
    assert (recorder.of(FallBack), recorder.of(VerificationFailed)) == ([], [])
    assert {event.outcome for event in recorder.of(Verified)} == {HELD}
    assert [event.range for event in recorder.of(ArtifactCompiled)] == ["s0=1", "s0=2-4096", "s0=4097-8192"]
    for size in (1, 2, 4096, 4097, 8192):
        x = torch.randn(size, 64)
        assert torch.allclose(program(x), Softmax()(x), rtol=1e-5, atol=1e-7)
