"""Log lines of a start: what was traced and compiled, in words that people grep for; a warm start is quiet.

On a cold start `grep -E "Dynamo|torch.compile took|cache directory"` finds the folder, the trace's time and the total.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass

from piecework.capture_events import Captured
from piecework.events import (
    ArtifactCompiled,
    ArtifactLoaded,
    ArtifactReused,
    CutInside,
    Event,
    FallBack,
    GraphWritten,
    PassDone,
    Phase,
    Recompiled,
    RecordHit,
    RecordMiss,
    SplitDone,
    StoreWarning,
)

log = logging.getLogger("piecework")
_COLD = ("trace", "split", "unique", "compile")


@dataclass
class _Start:
    """What a start did so far: the model's, or that of one of its parts."""

    compiled: int = 0
    reused: int = 0
    loaded: int = 0
    spent_s: float = 0.0


class ReportLines:
    """Write a line for what a person should know of each event; `place` is the store's folder, or `memory`.

    Where a model is compiled in parts, each line begins with the part's path, and each part has totals of its own.
    """

    def __init__(self, place: str, logger: logging.Logger = log) -> None:
        self.place = place
        self.log = logger
        self._starts: dict[str, _Start] = defaultdict(_Start)

    def __call__(self, event: Event) -> None:
        start = self._starts[event.part]
        match event:
            case RecordMiss():
                self._cold(event)
            case RecordHit():
                self._tell(event, "found program %s in the store (%s)", _short(event.key), event.layer)
            case Phase():
                self._phase(event, start)
            case PassDone():
                level = logging.WARNING if event.note else logging.INFO
                place = f" in {event.piece}" if event.piece else ""
                note = f"; {event.note}" if event.note else ""
                self._tell(event, "pass %s: %d matches%s%s", event.name, event.matches, place, note, level=level)
            case SplitDone():
                self._tell(
                    event, "%d regions: %d opaque, %d sites of %d distinct pieces",
                    event.regions, event.opaque, event.sites, event.distinct,
                )  # fmt: skip
            case CutInside():
                self._tell(
                    event, "%s, %s, is cut into %d regions, %d opaque",
                    event.piece, event.range, event.regions, event.opaque,
                )  # fmt: skip
            case ArtifactCompiled():
                start.compiled += 1
                low, high = _bounds(event.range)
                self._tell(
                    event, "Compiling a graph for compile range (%s, %s) takes %.2f s: %s, %s, %s",
                    low, high, event.elapsed_s, event.piece, event.range, event.compiler,
                )  # fmt: skip
                self._nearest(event)
            case ArtifactReused():
                start.reused += 1
                self._tell(event, "%s, %s, was in the store (%s)", event.piece, event.range, event.layer)
            case ArtifactLoaded():
                start.loaded += 1
            case Captured():
                self._tell(
                    event, "captured %s of %d tokens in %.2f s: %s, %d graphs, %d bytes",
                    event.phase, event.size, event.elapsed_s, event.form, event.graphs, event.size_bytes,
                )  # fmt: skip
            case GraphWritten():
                self._tell(event, "the split graph is at %s", event.path)
            case FallBack():
                self._tell(event, "%s: %s", event.what, event.reason, level=logging.WARNING)
            case StoreWarning():
                self._tell(event, "store: `%s`: %s", event.path, event.reason, level=logging.WARNING)
            case Recompiled():
                self._tell(event, "torch recompiled: %s", event.reason, level=logging.WARNING)

    def _tell(self, event: Event, text: str, *values: object, level: int = logging.INFO) -> None:
        part = (event.part,) if event.part else ()
        self.log.log(level, "%s: " * len(part) + text, *part, *values)

    def _cold(self, event: RecordMiss) -> None:
        self._starts[event.part] = _Start()
        self._tell(event, "Using cache directory: %s", self.place)
        self._tell(event, "no stored program is used: %s", event.reason)
        self._nearest(event)

    def _nearest(self, event: RecordMiss | ArtifactCompiled) -> None:
        for factor in event.factors:
            self._tell(event, "the nearest one, %s, differs in %s", event.nearest, factor)

    def _phase(self, event: Phase, start: _Start) -> None:
        if event.name in _COLD:
            start.spent_s += event.elapsed_s
        if event.name == "trace":
            self._tell(event, "Dynamo bytecode transform time: %.2f s", event.elapsed_s)
        elif event.name == "compile":
            self._tell(event, "compiled %d artifacts, %d were in the store", start.compiled, start.reused)
            self._tell(event, "torch.compile took %.2f s in total", start.spent_s)
        elif event.name == "load":
            self._tell(
                event, "loaded %d artifacts in %.2f s, compiled %d", start.loaded, event.elapsed_s, start.compiled
            )  # fmt: skip


def _short(key: str) -> str:
    group, _, digest = key.partition(".")
    return f"{group[:12]}.{digest[:12]}"


def _bounds(box: str) -> tuple[str, str]:
    """Return the first symbol's bounds: `s0=2-64,s1=1` gives 2 and 64; a piece without sizes has none."""
    bounds = box.split(",")[0].partition("=")[2]
    low, _, high = bounds.partition("-")
    return low or "-", high or low or "-"
