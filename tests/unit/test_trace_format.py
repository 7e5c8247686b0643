"""A run's file is what Chrome's trace format asks for, and holds no span that Perfetto's reader would leave out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from piecework.diagnostics.run_file import Run, _micro, read_run, write_run
from piecework.diagnostics.timeline import Timeline
from piecework.errors import OptionError
from piecework.events import Drift, Phase, fan_out, phase
from piecework.span_events import sub_phase
from piecework.spans import carry
from trace_format import left_out_by_perfetto, read_strictly


@given(st.integers(0, 10**14))
@example(1_001_001)
@example(4_035_225)
def test_every_nanosecond_comes_back_however_it_is_read(time_ns: int) -> None:
    """As a double that is cut off, one that is rounded, and as decimal digits cut off behind the third."""
    value = _micro(time_ns)
    assert int(value * 1000.0) == round(value * 1000.0) == time_ns
    whole, _, digits = repr(value).partition(".")
    assert int(whole + digits.ljust(3, "0")[:3]) == time_ns


def test_a_run_is_one_document_whose_spans_nest_in_each_thread(tmp_path: Path) -> None:
    timeline = Timeline()
    observer = fan_out(timeline)
    with phase(observer, "outer"):
        with phase(observer, "inner"), sub_phase("deep", "a \"name\" with \\ and \n and \x1b and \u2028 and é"):
            observer(Phase(name="moment"))

        def tell() -> None:
            observer(Drift(step=1, error=float("nan"), output="0", num_compared=1))

        thread = threading.Thread(target=carry(tell), name="a <thread>")
        thread.start()
        thread.join()
    timeline.write(tmp_path / "run.json")
    document = read_strictly(tmp_path / "run.json")
    assert left_out_by_perfetto(document) == []
    named = {entry["tid"]: entry["args"]["name"] for entry in document["traceEvents"] if entry["ph"] == "M"}
    assert "a <thread>" in named.values()
    (told,) = (entry for entry in document["traceEvents"] if entry.get("cat") == "Drift")
    assert told["args"]["error"] == "nan"
    run = read_run(tmp_path / "run.json")
    assert [dict(event) for event in run.events] == [
        {name: list(value) if isinstance(value, tuple) else value for name, value in event.items()}
        for event in timeline.run().events
    ]


def test_spans_that_end_together_are_kept_where_times_are_cut_off(tmp_path: Path) -> None:
    """Written as plain quotients, one in two hundred of these times is read as the nanosecond before."""
    spans = [(start + later, start + 900) for start in range(1_001_001, 1_101_001, 997) for later in (0, 0, 1)]
    events = [
        {"event": "Phase", "name": "x", "start_ns": start, "end_ns": end, "process": 1, "thread": 1}
        for start, end in spans
    ]
    write_run(Run(events, 2_000_000), tmp_path / "run.json")
    assert left_out_by_perfetto(read_strictly(tmp_path / "run.json")) == []
    plain = [complete(start / 1000, (end - start) / 1000) for start, end in spans]
    assert left_out_by_perfetto({"traceEvents": plain}) != []


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [{}], "piecework": {}}', "\x00", ""]
)
def test_what_is_no_run_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(OptionError, match="is no run"):
        read_run(tmp_path / "run.json")


def complete(start: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "ts": start, "dur": length, "pid": 1, "tid": 1, "name": f"{start:g}"}


def test_the_reader_of_these_tests_finds_what_crosses() -> None:
    assert left_out_by_perfetto({"traceEvents": [complete(0, 10), complete(5, 10)]}) == ["5"]
    assert left_out_by_perfetto({"traceEvents": [complete(0, 10), complete(5, 5), complete(10, 1)]}) == []
