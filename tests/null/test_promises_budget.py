"""A piece that takes too long to compile runs eager: said aloud at every start, and tried again with more time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.compilers.eager import EagerCompiler
from piecework.events import ArtifactCompiled, ArtifactReused, FallBack, Phase, Recorder, RecordHit, RecordMiss
from piecework.values.artifact import Artifact
from piecework.values.shapes import Range

_library = torch.library.Library("budget", "DEF")
_library.define("cut(Tensor rows) -> Tensor")


@pw.split_op("budget::cut")
def cut(rows: torch.Tensor) -> torch.Tensor:
    return rows + 1


_library.impl("cut", cut, "CPU")
torch.library.register_fake("budget::cut", torch.empty_like, lib=_library)


class Slow(EagerCompiler):
    """A compiler that does not get done with pieces that take a sine before `release` is set."""

    name = "slow"

    def __init__(self, release: threading.Event) -> None:
        self.release = release
        self.compiled: list[str] = []

    def compile(self, text: str, box: Mapping[str, Range]) -> Artifact:
        """Compile at once what has no sine in it."""
        if "sin" in text:
            self.release.wait()
        self.compiled.append(text)
        return super().compile(text, box)


class TwoPieces(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.ops.budget.cut(rows * 2))


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Let compilers that still wait go at the end."""
    event = threading.Event()
    yield event
    event.set()


def start(compiler: Any, store: Any, budget_s: float) -> tuple[pw.Program, Recorder]:
    seen = Recorder()
    options = pw.CompileOptions(
        compiler=compiler, max_num_batched_tokens=64, ranges=((1, 64),), size_one=False, compile_budget_s=budget_s
    )
    rows = torch.randn(5, 2)
    program = pw.compile(TwoPieces(), (rows,), dynamic={"rows": {0: "n"}}, options=options, store=store, observer=seen)
    with torch.no_grad():
        assert torch.equal(program(rows), TwoPieces()(rows))
    return program, seen


def test_a_piece_over_its_budget_runs_eager_and_says_so(release: threading.Event, tmp_path: Path) -> None:
    compiler = Slow(release)
    program, seen = start(compiler, pw.DiskStore(tmp_path), 0.2)
    assert [event.compiler for event in seen.of(ArtifactCompiled)] == ["slow", "eager"]
    (event,) = seen.of(FallBack)
    assert event.what.startswith("piece 1 ")
    assert event.what.endswith(" at s0=2-64 runs eager")
    assert event.reason == "compiling took longer than the budget of 0.2 s"

    # The next start finds all of it, and says it again; so does one that is told the key.
    again, warm = start(Slow(release), pw.DiskStore(tmp_path), 0.2)
    assert again.key == program.key and warm.of(RecordHit) and not warm.of(ArtifactCompiled)
    assert [event.reason for event in warm.of(FallBack)] == ["compiling took longer than the budget of 0.2 s"]
    told = Recorder()
    pw.load(pw.DiskStore(tmp_path), key=program.key, weights={}, observer=told)
    assert [event.what for event in told.of(FallBack)] == ["piece 1 at s0=2-64 runs otherwise than asked for"]


def test_with_more_time_only_that_piece_is_compiled(release: threading.Event, tmp_path: Path) -> None:
    first, _ = start(Slow(release), pw.DiskStore(tmp_path), 0.2)
    release.set()
    for budget_s in (0.0, 60.0):
        compiler = Slow(release)
        program, seen = start(compiler, pw.DiskStore(tmp_path), budget_s)
        if budget_s == 0.0:
            assert "now it may take longer" in seen.of(RecordMiss)[0].reason
            assert len(compiler.compiled) == 1 and "sin" in compiler.compiled[0]
            assert len(seen.of(ArtifactReused)) == 1
        else:
            assert compiler.compiled == [] and seen.of(RecordHit)
        assert program.key != first.key
        assert seen.of(FallBack) == []
    # A smaller budget finds what the larger one made: there is nothing left to compile.
    program, seen = start(Slow(threading.Event()), pw.DiskStore(tmp_path), 0.1)
    assert seen.of(ArtifactCompiled) == []
    assert "trace" not in {event.name for event in seen.of(Phase)}


def test_a_function_as_compiler_has_a_budget_too(release: threading.Event) -> None:
    def compiler(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if any("sin" in str(node.target) for node in graph.graph.nodes):
            release.wait()
        return graph.forward

    _, seen = start(compiler, pw.MemoryStore(), 0.2)
    assert [event.compiler for event in seen.of(ArtifactCompiled)] == ["callable", "eager"]
    assert len(seen.of(FallBack)) == 1


def test_what_a_compiler_raises_within_its_budget_is_raised() -> None:
    class Broken(Slow):
        def compile(self, text: str, box: Mapping[str, Range]) -> Artifact:
            raise KeyError("a bug of the compiler's own")

    with pytest.raises(KeyError, match="a bug of the compiler's own"):
        start(Broken(threading.Event()), pw.MemoryStore(), 60.0)
