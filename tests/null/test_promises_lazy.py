"""Sizes compiled when they are met: off by default, once each, beside the steps, and never where it is forbidden."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.compilers.eager import EagerCompiler
from piecework.errors import CompileError, OptionError
from piecework.events import ArtifactCompiled, ArtifactReused, Event, FallBack, SizeReady
from piecework.values.artifact import TEXT, Artifact
from piecework.values.shapes import Range, format_box


class Stamping(EagerCompiler):
    """A compiler whose pieces add how many sizes their box holds, so that a result tells which artifact gave it."""

    name = "stamping"

    def __init__(self) -> None:
        self.boxes: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, text: str, box: Mapping[str, Range]) -> Artifact:
        """Wait for the gate."""
        assert self.gate.wait(60)
        self.boxes.append(format_box(box))
        width = sum(size.high - size.low + 1 for size in box.values())
        assert "torch.add(x0, 0)" in text
        return Artifact(TEXT, text.replace("torch.add(x0, 0)", f"torch.add(x0, {width})"))


class Failing(Stamping):
    """Compiles ranges, and no size alone."""

    def compile(self, text: str, box: Mapping[str, Range]) -> Artifact:
        """Fail where a box is one size above 1."""
        if any(size.is_single and size.low > 1 for size in box.values()):
            raise CompileError("the compiler knows no such size")
        return super().compile(text, box)


class Watching:
    """An observer that others can wait for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[Event], count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(kind)) >= count, timeout=60), self.events


class Plain(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.add(rows, 0)


def start(compiler: Any, watch: Watching, store: Any = None, **options: Any) -> pw.Program:
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "ranges": ((1, 16), (17, 64)), "verify": False} | options
    return pw.compile(
        Plain(), (torch.zeros(5, 2),), dynamic={"rows": {0: "tokens"}}, observer=watch,
        options=pw.CompileOptions(compiler=compiler, **settings), store=store or pw.MemoryStore(),
    )  # fmt: skip


def served(program: pw.Program, size: int) -> int:
    """Return how many sizes the artifact is for that served a call."""
    with torch.no_grad():
        return int(program(torch.zeros(size, 2))[0, 0])


def test_without_the_option_nothing_is_compiled_after_bind() -> None:
    compiler, watch = Stamping(), Watching()
    program = start(compiler, watch)
    boxes = list(compiler.boxes)
    assert [served(program, size) for size in (1, 2, 7, 7, 7, 16, 17, 64)] == [1, 15, 15, 15, 15, 15, 48, 48]
    assert compiler.boxes == boxes
    assert watch.of(SizeReady) == []


def test_a_listed_size_is_compiled_once_it_is_met() -> None:
    compiler, watch = Stamping(), Watching()
    program = start(compiler, watch, lazy_sizes=(7, 32))
    assert "s0=7" not in compiler.boxes
    compiler.gate.clear()
    assert served(program, 8) == 15  # not listed
    assert served(program, 7) == 15  # the first call is served by the range, while the thread waits at the gate
    assert served(program, 7) == 15
    assert watch.of(SizeReady) == []
    compiler.gate.set()
    watch.wait_for(SizeReady)
    assert served(program, 7) == 1
    assert served(program, 8) == 15
    assert [event.size for event in watch.of(SizeReady)] == [7]
    assert compiler.boxes.count("s0=7") == 1
    assert "s0=32" not in compiler.boxes
    assert served(program, 32) == 48
    watch.wait_for(SizeReady, 2)
    assert served(program, 32) == 1


def test_two_threads_that_meet_a_size_compile_it_once() -> None:
    compiler, watch = Stamping(), Watching()
    program = start(compiler, watch, lazy_sizes=(7,))
    together = threading.Barrier(8)
    results: list[int] = []

    def step() -> None:
        together.wait(60)
        results.extend(served(program, 7) for _ in range(50))

    threads = [threading.Thread(target=step) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watch.wait_for(SizeReady)
    assert set(results) <= {1, 15}
    assert compiler.boxes.count("s0=7") == 1
    assert len(watch.of(SizeReady)) == 1
    assert served(program, 7) == 1


def test_nothing_is_compiled_where_it_is_forbidden() -> None:
    compiler, watch = Stamping(), Watching()
    program = start(compiler, watch, lazy_sizes=(7,))
    boxes = list(compiler.boxes)
    with pw.no_compile():
        assert [served(program, 7) for _ in range(5)] == [15] * 5
    assert compiler.boxes == boxes
    assert threading.active_count() == 1 or all("piecework-size" not in t.name for t in threading.enumerate())
    assert served(program, 7) == 15  # allowed again: now it is asked for
    watch.wait_for(SizeReady)
    assert served(program, 7) == 1


def test_a_size_that_does_not_compile_stays_with_its_range() -> None:
    compiler, watch = Failing(), Watching()
    program = start(compiler, watch, lazy_sizes=(7,))
    assert served(program, 7) == 15
    watch.wait_for(FallBack, 2)
    assert "size 7 stays with the artifacts of its range" in [event.what for event in watch.of(FallBack)]
    assert any("the compiler knows no such size" in event.reason for event in watch.of(FallBack))
    assert [served(program, 7) for _ in range(3)] == [15] * 3
    assert watch.of(SizeReady) == []


def test_a_size_that_was_compiled_before_is_found(tmp_path: Path) -> None:
    first, second = Watching(), Watching()
    program = start(Stamping(), first, pw.DiskStore(tmp_path), lazy_sizes=(7,))
    served(program, 7)
    first.wait_for(SizeReady)
    compiler = Stamping()
    again = start(compiler, second, pw.DiskStore(tmp_path), lazy_sizes=(7,))
    assert served(again, 7) == 15
    second.wait_for(SizeReady)
    assert served(again, 7) == 1
    assert compiler.boxes == []
    assert second.of(ArtifactCompiled) == []
    assert [event.range for event in second.of(ArtifactReused)] == ["s0=7"]
    assert again.key == program.key


def test_sizes_that_are_no_sizes_of_the_program_are_left_out() -> None:
    compiler, watch = Stamping(), Watching()
    program = start(compiler, watch, lazy_sizes=(1, 7, 7, 500), single_sizes=(9,))
    assert [served(program, size) for size in (1, 9)] == [1, 1]
    with pytest.raises(pw.errors.ShapeOutOfRange):
        served(program, 500)
    with pytest.raises(OptionError, match="lazy_sizes"):
        pw.CompileOptions(lazy_sizes=("seven",))  # type: ignore[arg-type]


def test_with_two_sizes_the_first_is_compiled_for_every_range_of_the_second() -> None:
    class Two(nn.Module):
        def forward(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            return torch.add(rows, 0).sum() + columns.sum() * 0

    class Counting(Stamping):
        def compile(self, text: str, box: Mapping[str, Range]) -> Artifact:
            self.boxes.append(format_box(box))
            width = 1000 * (box["s0"].high - box["s0"].low + 1) + box["s1"].high - box["s1"].low + 1
            return Artifact(TEXT, text.replace("torch.add(x0, 0)", f"torch.add(x0, {width})"))

    compiler, watch = Counting(), Watching()
    program = pw.compile(
        Two(), (torch.zeros(5, 1), torch.zeros(3, 1)), dynamic={"rows": {0: "tokens"}, "columns": {0: "batch"}},
        options=pw.CompileOptions(
            compiler=compiler, max_num_batched_tokens=8, ranges=((1, 8),), lazy_sizes=(4,), verify=False
        ),
        store=pw.MemoryStore(), observer=watch,
    )  # fmt: skip

    def call(tokens: int, batch: int) -> float:
        with torch.no_grad():
            return float(program(torch.zeros(tokens, 1), torch.zeros(batch, 1))) / tokens

    assert [call(5, 3), call(5, 1), call(4, 3)] == [7007, 7001, 7007]
    watch.wait_for(SizeReady)
    assert [call(4, 3), call(4, 1), call(5, 3)] == [1007, 1001, 7007]
