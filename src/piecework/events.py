"""What can be observed: small frozen events, and the protocol of whoever listens.

An event is emitted when the thing it tells of has ended; `start_ns` and `end_ns` are
`time.perf_counter_ns()` readings, equal where the thing takes no time. Events that begin and end around others are
spans: they have a number of their own, and those inside name it as their parent, also from other threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, TypeVar

from piecework.spans import open_span, spanning


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, with when it began and ended (nanoseconds of the performance counter).

    `part` is the path of the model's part that it tells of, where a model is compiled in parts. `process` and `thread`
    are the system's numbers of where it happened, `parent` is the span that it lies in, and `span` its own number where
    others may lie in it.
    """

    part: str = ""
    start_ns: int = 0  # where it is not given, it is `end_ns`: nothing that takes time
    end_ns: int = field(default_factory=time.perf_counter_ns)
    process: int = field(default_factory=os.getpid)
    thread: int = field(default_factory=threading.get_native_id)
    parent: int = field(default_factory=open_span)
    span: int = 0

    def __post_init__(self) -> None:
        if not self.start_ns:
            object.__setattr__(self, "start_ns", self.end_ns)

    @property
    def takes_time(self) -> bool:
        """Whether it is a span rather than a moment."""
        return self.end_ns > self.start_ns

    @property
    def elapsed_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Return the event as plain data, its type's name under `event`; a float that is no number stands as text."""
        return {"event": type(self).__name__} | {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    """JSON has no infinity, and readers of a trace stop at one."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


Observer = Callable[[Event], None]
EventType = TypeVar("EventType", bound=Event)


def ignore(event: Event) -> None:
    """Observe nothing."""


def fan_out(*observers: Observer) -> Observer:
    """Make one observer that passes each event to all of `observers`, in order."""

    def observe(event: Event) -> None:
        for observer in observers:
            observer(event)

    return observe


class Recorder:
    """Keep every event in a list; `recorder.of(Kind)` filters by type."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[EventType]) -> list[EventType]:
        """Return the events of one type, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]


@dataclass(frozen=True, kw_only=True)
class Phase(Event):
    """A named phase of start-up ended: trace, audit, split, unique, key, compile, load, bind, weights, …"""

    name: str
    detail: str = ""


@contextmanager
def phase(observer: Observer, name: str, detail: str = "") -> Iterator[None]:
    """Emit a `Phase` around the block, also where the block raises."""
    start_ns, number = time.perf_counter_ns(), 0
    try:
        with spanning(observer) as number:
            yield
    finally:
        observer(Phase(name=name, detail=detail, start_ns=start_ns, span=number))


@dataclass(frozen=True, kw_only=True)
class Ready(Event):
    """What was asked for can be called from now on: nothing is compiled after this unless it was asked for."""

    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitDone(Event):
    """The graph was cut; counts of regions, opaque calls, sites, distinct pieces and the artifacts that they need."""

    regions: int
    opaque: int
    sites: int
    distinct: int
    artifacts: int = 0


@dataclass(frozen=True, kw_only=True)
class CutInside(Event):
    """A graph that was compiled whole for a range was cut in its text; counts as in `SplitDone`."""

    piece: str
    range: str
    regions: int
    opaque: int


@dataclass(frozen=True, kw_only=True)
class PassDone(Event):
    """A pass ran over a graph or a piece: how often it matched, and in `note` what its author should know."""

    name: str
    version: int
    runs_on: str
    matches: int
    piece: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordHit(Event):
    """A program record was found and trusted; nothing is traced. `layer` is where: memory, disk or remote."""

    key: str
    layer: str = ""


@dataclass(frozen=True, kw_only=True)
class RecordMiss(Event):
    """No program record could be used; `factors` names what differs from the `nearest` one."""

    lookup: str
    reason: str
    factors: tuple[str, ...] = ()
    nearest: str = ""


@dataclass(frozen=True, kw_only=True)
class ArtifactCompiled(Event):
    """One piece was compiled for one range; `factors` names what differs from the `nearest` artifact of the piece."""

    piece: str
    range: str
    key: str
    compiler: str
    size_bytes: int
    factors: tuple[str, ...] = ()
    nearest: str = ""


@dataclass(frozen=True, kw_only=True)
class ArtifactLoaded(Event):
    """One artifact was read from the store, verified and loaded."""

    piece: str
    range: str
    key: str
    size_bytes: int
    layer: str = ""


@dataclass(frozen=True, kw_only=True)
class ArtifactReused(Event):
    """An artifact needed now was in a layer of the store already, so the compiler did not run."""

    piece: str
    range: str
    key: str
    layer: str = ""


@dataclass(frozen=True, kw_only=True)
class RangeSplit(Event):
    """The compiler assumed more of the sizes than a range says, so that the range is served in parts."""

    piece: str
    range: str
    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verified(Event):
    """An artifact was run beside its piece's text: it `held`, `failed`, or was `untried` for a reason."""

    piece: str
    range: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class VerificationFailed(Event):
    """An artifact does not give what its piece's text gives, and is not served."""

    piece: str
    range: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Drift(Event):
    """One step in many was run uncompiled as well: how far the program's results were from eager's."""

    step: int
    error: float
    output: str
    num_compared: int


@dataclass(frozen=True, kw_only=True)
class SizeReady(Event):
    """A size that was met is served by artifacts of its own from now on; they were made beside the steps."""

    size: int


@dataclass(frozen=True, kw_only=True)
class FallBack(Event):
    """Something runs by a slower or more general way than asked for, and why."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StoreRead(Event):
    """A record or blob was read."""

    kind: str
    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoreWrite(Event):
    """A record or blob was written."""

    kind: str
    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoreWarning(Event):
    """The store met a damaged, untrusted or unwritable entry and went on without it; a rejected one was not read."""

    path: str
    reason: str
    is_rejected: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphWritten(Event):
    """The split graph was left as Python that runs, for people to read."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Recompiled(Event):
    """torch.compile recompiled in `stock` mode."""

    reason: str
