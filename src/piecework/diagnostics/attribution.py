"""Where the time went: which span had it, and what nothing explains.

A span's own time is what none of those inside it covers, in whichever threads they ran. What no span covers at all is
not attributed to anything, and is told as gaps between the spans before and after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.diagnostics.run_file import Run, title

Interval = tuple[int, int]


@dataclass(frozen=True)
class OwnTime:
    """One span with the time that is its own; `path` are the titles of what it lies in, itself last."""

    event: Mapping[str, Any]
    path: tuple[str, ...]
    own_ns: int
    is_leaf: bool


@dataclass(frozen=True)
class Gap:
    """A stretch that no span covers, between what ended before it and what began after it."""

    start_ns: int
    end_ns: int
    before: str
    after: str

    @property
    def elapsed_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class Attribution:
    """All of a run's time: what each span had for itself, and the gaps. `explained` is the share that is in spans."""

    wall_ns: int
    spans: tuple[OwnTime, ...]
    gaps: tuple[Gap, ...]

    @property
    def explained(self) -> float:
        lost = sum(gap.end_ns - gap.start_ns for gap in self.gaps)
        return 1 - lost / self.wall_ns if self.wall_ns else 1.0

    def longest(self, count: int) -> list[OwnTime]:
        """Return the spans with most time of their own."""
        return sorted(self.spans, key=lambda span: -span.own_ns)[:count]


def attribute(run: Run, *, until_ns: int = 0) -> Attribution:
    """Attribute the time of a run, of all of it or until a moment such as its `ready_ns`."""
    end = until_ns or run.wall_ns
    spans = [event for event in run.events if event["end_ns"] > event["start_ns"] and event["start_ns"] < end]
    known = {(event["process"], event["span"]) for event in spans if event["span"]}
    inside: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for event in spans:
        above = (event["process"], event["parent"])
        inside[above if above in known else (0, 0)].append(event)
    found: list[OwnTime] = []
    waiting: list[tuple[Mapping[str, Any], tuple[str, ...]]] = [(event, ()) for event in inside[0, 0]]
    while waiting:
        event, outer = waiting.pop()
        path = (*outer, title(event))
        children = inside[event["process"], event["span"]] if event["span"] else []
        waiting.extend((child, path) for child in children)
        limits = (event["start_ns"], min(event["end_ns"], end))
        own = limits[1] - limits[0] - sum(e - s for s, e in union(map(_times, children), limits))
        found.append(OwnTime(event, path, own, not children))
    return Attribution(end, tuple(found), _gaps(inside[0, 0], end))


def union(intervals: Iterable[Interval], limits: Interval) -> list[Interval]:
    """Join intervals that touch, inside limits; oldest first."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, limits[0]), min(end, limits[1])
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _gaps(top: Sequence[Mapping[str, Any]], end: int) -> tuple[Gap, ...]:
    covered = union(map(_times, top), (0, end))
    starts, ends = [0, *(stop for _, stop in covered)], [*(start for start, _ in covered), end]
    by_end = {event["end_ns"]: title(event) for event in top}
    by_start = {event["start_ns"]: title(event) for event in top}
    return tuple(
        Gap(start, stop, by_end.get(start, "the start"), by_start.get(stop, "the end"))
        for start, stop in zip(starts, ends, strict=True)
        if stop > start
    )


def _times(event: Mapping[str, Any]) -> Interval:
    return event["start_ns"], event["end_ns"]
