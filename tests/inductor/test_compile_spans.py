"""A compile through Inductor runs in a context of its own, and is seen in its parts nevertheless."""

from __future__ import annotations

from pathlib import Path

from piecework.compilers.inductor import InductorCompiler
from piecework.events import Recorder
from piecework.span_events import SubPhase
from piecework.spans import spanning
from piecework.values.shapes import Range
from toy_pieces import MIDDLE


def test_a_compile_tells_its_parts_to_whoever_observes_it(tmp_path: Path) -> None:
    seen = Recorder()
    compiler = InductorCompiler(threads=1, working_folder=str(tmp_path))
    with spanning(seen, "piece 0 for s0=2-8") as span:
        compiler.compile(MIDDLE, {"s0": Range(2, 8)})
    parts = [(event.name, event.parent) for event in seen.of(SubPhase) if event.parent == span]
    assert parts == [(name, span) for name in ("rebuild", "wait", "Inductor", "guards", "strip")]
    assert any(event.name == "C++" for event in seen.of(SubPhase))
