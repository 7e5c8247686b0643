"""The spans of a run as bars in order, each under the one that it lies in; what is too short to see is put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from piecework.diagnostics.run_file import Run, title
from piecework.values.view import Bar

_LEAST_SHARE = 0.002  # of the whole: two pixels of a thousand
_MOST_BARS = 240

Fields = Mapping[str, Any]


def waterfall(run: Run) -> tuple[Bar, ...]:
    """Return the bars of a run, depth first."""
    spans = [event for event in run.events if event["end_ns"] > event["start_ns"]]
    least = max(run.wall_ns * _LEAST_SHARE, _shortest_kept(spans))
    known = {(event["process"], event["span"]) for event in spans if event["span"]}
    inside: dict[tuple[int, int], list[Fields]] = defaultdict(list)
    for event in spans:
        above = (event["process"], event["parent"])
        inside[above if above in known else (0, 0)].append(event)
    bars: list[Bar] = []
    _add(bars, inside, (0, 0), 0, least)
    return tuple(bars)


def _shortest_kept(spans: Sequence[Fields]) -> int:
    lengths = sorted((event["end_ns"] - event["start_ns"] for event in spans), reverse=True)
    return lengths[_MOST_BARS] if len(lengths) > _MOST_BARS else 0


def _add(
    bars: list[Bar], inside: Mapping[tuple[int, int], list[Fields]], place: tuple[int, int], depth: int, least: float
) -> None:
    short: list[Fields] = []
    for event in sorted(inside.get(place, ()), key=lambda each: each["start_ns"]):
        if event["end_ns"] - event["start_ns"] < least:
            short.append(event)
            continue
        own = (event["process"], event["span"])
        children = inside.get(own, []) if event["span"] else []
        covered = _covered(children, event["start_ns"], event["end_ns"])
        bars.append(
            Bar(
                title(event), depth, event["start_ns"], event["end_ns"],
                event["end_ns"] - event["start_ns"] - covered, detail=str(event.get("detail", "")),
            )
        )  # fmt: skip
        if children:
            _add(bars, inside, own, depth + 1, least)
    if len(short) == 1:
        bars.append(Bar(title(short[0]), depth, short[0]["start_ns"], short[0]["end_ns"]))
    elif short:
        start = min(event["start_ns"] for event in short)
        end = max(event["end_ns"] for event in short)
        bars.append(Bar(f"{len(short)} shorter spans", depth, start, end, _covered(short, start, end), len(short)))


def _covered(spans: Sequence[Fields], low: int, high: int) -> int:
    total, reached = 0, low
    for event in sorted(spans, key=lambda each: each["start_ns"]):
        start, end = max(event["start_ns"], reached), min(event["end_ns"], high)
        if end > start:
            total, reached = total + end - start, end
    return total
