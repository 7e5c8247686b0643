"""Log lines of a start: what was traced and compiled, in words that people grep for; a warm start is quiet.

On a cold start `grep -E "Dynamo|torch.compile took|cache directory"` finds the folder, the trace's time and the total.
"""

from __future__ import annotations

import logging

from piecework.events import (
    ArtifactCompiled,
    ArtifactLoaded,
    ArtifactReused,
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


class ReportLines:
    """Write a line for what a person should know of each event; `place` is the store's folder, or `memory`."""

    def __init__(self, place: str, logger: logging.Logger = log) -> None:
        self.place = place
        self.log = logger
        self.compiled = self.reused = 0
        self.spent_s = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case RecordMiss():
                self._cold(event)
            case RecordHit():
                self.log.info("found program %s", _short(event.key))
            case Phase():
                self._phase(event)
            case PassDone():
                told = self.log.warning if event.note else self.log.info
                place = f" in {event.piece}" if event.piece else ""
                told("pass %s: %d matches%s%s", event.name, event.matches, place, f"; {event.note}" * bool(event.note))
            case SplitDone():
                self.log.info(
                    "%d regions: %d opaque, %d sites of %d distinct pieces",
                    event.regions, event.opaque, event.sites, event.distinct,
                )  # fmt: skip
            case ArtifactCompiled():
                self.compiled += 1
                low, high = _bounds(event.range)
                self.log.info(
                    "Compiling a graph for compile range (%s, %s) takes %.2f s: %s, %s, %s",
                    low, high, event.elapsed_s, event.piece, event.range, event.compiler,
                )  # fmt: skip
            case ArtifactReused():
                self.reused += 1
            case GraphWritten():
                self.log.info("the split graph is at %s", event.path)
            case FallBack():
                self.log.warning("%s: %s", event.what, event.reason)
            case StoreWarning():
                self.log.warning("store: `%s`: %s", event.path, event.reason)
            case Recompiled():
                self.log.warning("torch recompiled: %s", event.reason)

    def _cold(self, event: RecordMiss) -> None:
        self.compiled, self.reused, self.spent_s = 0, 0, 0.0
        self.log.info("Using cache directory: %s", self.place)
        self.log.info("no stored program is used: %s", event.reason)
        for factor in event.factors:
            self.log.info("the nearest one differs in %s", factor)

    def _phase(self, event: Phase) -> None:
        if event.name in _COLD:
            self.spent_s += event.elapsed_s
        if event.name == "trace":
            self.log.info("Dynamo bytecode transform time: %.2f s", event.elapsed_s)
        elif event.name == "compile":
            self.log.info("compiled %d artifacts, %d were in the store", self.compiled, self.reused)
            self.log.info("torch.compile took %.2f s in total", self.spent_s)


class Tally:
    """Count what a start did: artifacts compiled and loaded, their bytes, and the seconds of each phase."""

    def __init__(self) -> None:
        self.compiled = self.reused = self.loaded = 0
        self.compiled_bytes = self.loaded_bytes = 0
        self.seconds: dict[str, float] = {}
        self.misses: list[dict[str, object]] = []
        self.is_hit = False

    def __call__(self, event: Event) -> None:
        match event:
            case ArtifactCompiled():
                self.compiled += 1
                self.compiled_bytes += event.size_bytes
            case ArtifactReused():
                self.reused += 1
            case ArtifactLoaded():
                self.loaded += 1
                self.loaded_bytes += event.size_bytes
            case RecordHit():
                self.is_hit = True
            case RecordMiss():
                self.misses.append({"reason": event.reason, "factors": list(event.factors)})
            case Phase():
                self.seconds[event.name] = self.seconds.get(event.name, 0.0) + event.elapsed_s

    def timings(self) -> dict[str, float]:
        """Return each phase's seconds under `<phase>_s`; a phase that did not happen took none."""
        usual = ("model", "trace", "split", "unique", "compile", "load", "weights", "bind")
        return {f"{name}_s": round(self.seconds.get(name, 0.0), 6) for name in dict.fromkeys([*usual, *self.seconds])}


def _short(key: str) -> str:
    group, _, digest = key.partition(".")
    return f"{group[:12]}.{digest[:12]}"


def _bounds(box: str) -> tuple[str, str]:
    """Return the first symbol's bounds: `s0=2-64,s1=1` gives 2 and 64; a piece without sizes has none."""
    bounds = box.split(",")[0].partition("=")[2]
    low, _, high = bounds.partition("-")
    return low or "-", high or low or "-"
