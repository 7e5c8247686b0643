"""What a run did, in numbers: an observer, one for each that wants to count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from piecework.capture_events import Captured, CaptureSkipped, Replayed, Uncovered
from piecework.events import (
    ArtifactCompiled,
    ArtifactLoaded,
    ArtifactReused,
    Event,
    FallBack,
    Phase,
    Ready,
    Recompiled,
    RecordHit,
    RecordMiss,
    SplitDone,
    StoreWarning,
    VerificationFailed,
)


@dataclass
class Counters:
    """Count what happens; several threads may tell of it at once, each number is then off by no more than they are.

    `rejected` are artifacts that were not served because they do not give what their piece gives, and entries of a
    store that were damaged or not trusted. `padded` are replays of a size larger than the step. `compiles_after_ready`
    is what a server watches: artifacts compiled, and recompiles of torch's, once the part could be called.
    """

    graphs: int = 0
    sites: int = 0
    distinct: int = 0
    compiled: int = 0
    reused: int = 0
    loaded: int = 0
    rejected: int = 0
    fall_backs: int = 0
    captures: int = 0
    captures_skipped: int = 0
    replays: int = 0
    padded: int = 0
    padded_tokens: int = 0
    uncovered: int = 0
    recompiles: int = 0
    compiles_after_ready: int = 0
    compiled_bytes: int = 0
    loaded_bytes: int = 0
    is_hit: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    misses: list[dict[str, Any]] = field(default_factory=list)
    compiled_for: Counter[str] = field(default_factory=Counter)
    _ready: set[str] = field(default_factory=set)

    def __call__(self, event: Event) -> None:
        match event:
            case Replayed():  # first: it alone comes with every step
                self.replays += 1
                self.padded += event.size > event.num_tokens
                self.padded_tokens += event.size - event.num_tokens
            case Uncovered():
                self.uncovered += 1
            case Captured():
                self.captures += 1
            case CaptureSkipped():
                self.captures_skipped += 1
            case _:
                self._count(event)

    def _count(self, event: Event) -> None:
        match event:
            case SplitDone():
                self.graphs += 1
                self.sites += event.sites
                self.distinct += event.distinct
            case ArtifactCompiled():
                self.compiled += 1
                self.compiled_bytes += event.size_bytes
                self.compiled_for[event.range] += 1
                self.compiles_after_ready += event.part in self._ready
            case ArtifactReused():
                self.reused += 1
            case ArtifactLoaded():
                self.loaded += 1
                self.loaded_bytes += event.size_bytes
            case VerificationFailed() | StoreWarning(is_rejected=True):
                self.rejected += 1
            case FallBack():
                self.fall_backs += 1
            case Recompiled():
                self.recompiles += 1
                self.compiles_after_ready += 1
            case RecordHit():
                self.is_hit = True
            case RecordMiss():
                self.misses.append({"reason": event.reason, "factors": list(event.factors)})
                self._ready.discard(event.part)  # another program is built under this name
            case Ready():
                self._ready.add(event.part)
            case Phase():
                self.seconds[event.name] = self.seconds.get(event.name, 0.0) + event.elapsed_s

    def timings(self) -> dict[str, float]:
        """Return each phase's seconds under `<phase>_s`; a phase that did not happen took none."""
        usual = ("model", "trace", "split", "unique", "compile", "load", "weights", "bind")
        return {f"{name}_s": round(self.seconds.get(name, 0.0), 6) for name in dict.fromkeys([*usual, *self.seconds])}

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        names = [name for name, value in vars(self).items() if isinstance(value, int) and not name.startswith("_")]
        return {name: getattr(self, name) for name in names} | {"compiled_for": dict(self.compiled_for)}
