"""A run's file reads back to the event, and time is attributed to spans, or told as gaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.diagnostics.attribution import attribute, union
from piecework.diagnostics.run_file import Run, read_run, title, write_run
from piecework.errors import OptionError


def span(name: str, start: int, end: int, *, number: int = 0, parent: int = 0, thread: int = 1) -> dict[str, Any]:
    return {
        "event": "Phase", "part": "", "start_ns": start, "end_ns": end, "process": 7, "thread": thread,
        "parent": parent, "span": number, "name": name, "detail": "",
    }  # fmt: skip


def test_own_time_is_what_no_child_covers_in_any_thread() -> None:
    events = [
        span("compile", 100, 900, number=1),
        span("one", 150, 500, parent=1, thread=2),
        span("two", 300, 700, parent=1, thread=3),
        span("ends", 950, 1000),
    ]
    found = attribute(Run(events, 1200))
    own = {each.path: (each.own_ns, each.is_leaf) for each in found.spans}
    assert own == {
        ("compile",): (250, False),
        ("compile", "one"): (350, True),
        ("compile", "two"): (400, True),
        ("ends",): (50, True),
    }
    assert [(gap.start_ns, gap.end_ns, gap.before, gap.after) for gap in found.gaps] == [
        (0, 100, "the start", "compile"),
        (900, 950, "compile", "ends"),
        (1000, 1200, "ends", "the end"),
    ]
    assert found.explained == pytest.approx(1 - 350 / 1200)
    assert found.longest(1)[0].path == ("compile", "two")


def test_until_a_moment_and_a_parent_that_is_not_there() -> None:
    events = [span("trace", 0, 400, number=1), span("late", 300, 900, parent=99)]
    found = attribute(Run(events, 1000, ready_ns=500), until_ns=500)
    assert {each.path: each.own_ns for each in found.spans} == {("trace",): 400, ("late",): 200}
    assert found.explained == 1


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))))
def test_union_covers_what_its_intervals_cover(intervals: list[tuple[int, int]]) -> None:
    covered = {moment for start, end in intervals for moment in range(max(start, 10), min(end, 50))}
    joined = union(intervals, (10, 50))
    assert {moment for start, end in joined for moment in range(start, end)} == covered
    assert all(first[1] < second[0] for first, second in zip(joined, joined[1:], strict=False))


def test_the_file_is_a_trace_and_reads_back_to_the_nanosecond(tmp_path: Path) -> None:
    events = [span("trace", 1_000_001, 123_456_789_123, number=3), {**span("x", 5, 5), "event": "Ready", "keys": ["k"]}]
    run = Run(events, 200_000_000_001, 5, {"command": ["piecework", "build"]}, {(7, 1): "MainThread"})
    write_run(run, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run
    document = json.loads((tmp_path / "run.json").read_text())
    assert list(document) == ["traceEvents", "displayTimeUnit", "piecework"]
    kinds = [entry["ph"] for entry in document["traceEvents"]]
    assert kinds == ["M", "M", "X", "i"]
    complete = document["traceEvents"][2]
    assert {"name": "trace", "cat": "Phase", "ts": 1000.001, "pid": 7, "tid": 1}.items() <= complete.items()
    assert complete["dur"] == (123_456_789_123 - 1_000_001) / 1000
    assert document["traceEvents"][1]["args"] == {"name": "MainThread"}


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', '{"piecework": {"format": "other"}}'])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(OptionError, match="run.json` (is no run|holds a run in a format)"):
        read_run(tmp_path / "run.json")
    with pytest.raises(OptionError, match="there is no run to read at"):
        read_run(tmp_path / "none.json")
    with pytest.raises(OptionError, match="cannot be written to"):
        write_run(Run([], 0), tmp_path / "no" / "run.json")


def test_titles_name_piece_range_and_part() -> None:
    event = {"event": "ArtifactCompiled", "part": "vision", "piece": "piece 0 (ab)", "range": "s0=2-64"}
    assert title(event) == "vision: compile piece 0 (ab) for s0=2-64"
    assert title({"event": "Imported", "package": "torch"}) == "import torch"
    assert title({"event": "Captured", "phase": "decode", "size": 8}) == "capture decode 8"
    assert title({"event": "Moved"}) == "Moved"
