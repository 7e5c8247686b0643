"""Chrome's trace format as its readers take it: what must stand in an entry, and which spans Perfetto leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS = {"X": ("ts", "dur", "pid", "tid", "name"), "i": ("ts", "pid", "tid", "name", "s"), "M": ("pid", "name", "args")}


def read_strictly(path: Path) -> dict[str, Any]:
    """Read a trace as JSON without Python's additions, and hold each entry to what its kind must have."""

    def refuse(word: str) -> None:
        raise ValueError(f"`{word}` is no JSON")

    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert next(iter(document)) == "traceEvents" and document["displayTimeUnit"] == "ms"
    for entry in document["traceEvents"]:
        lacking = [name for name in KINDS[entry["ph"]] if name not in entry]
        assert lacking == [], entry
        assert isinstance(entry["pid"], int) and 0 <= entry["pid"] < 1 << 32
        assert 0 <= entry.get("tid", 0) < 1 << 32
        assert entry["ph"] == "M" or entry["ts"] >= 0
        assert entry["ph"] != "M" or entry["name"] not in ("process_name", "thread_name") or entry["args"]["name"]
    return document


def left_out_by_perfetto(document: dict[str, Any]) -> list[str]:
    """Return the spans that partly overlap another one of their thread, times cut off to nanoseconds.

    The rule is that of Perfetto's slice tracker: spans come in order of their start, and those that have ended are
    closed; one that begins inside an open span and ends after it is dropped.
    """
    open_until: dict[tuple[int, int], list[int]] = {}
    dropped = []
    timed = [entry for entry in document["traceEvents"] if entry["ph"] in "Xi"]
    for entry in sorted(timed, key=lambda each: int(each["ts"] * 1000.0)):
        start, length = int(entry["ts"] * 1000.0), int(entry.get("dur", 0) * 1000.0)
        stack = open_until.setdefault((entry["pid"], entry["tid"]), [])
        while stack and stack[-1] <= start:
            stack.pop()
        if stack and start + length > stack[-1]:
            dropped.append(entry["name"])
        else:
            stack.append(start + length)
    return dropped
