"""What can be observed of capture and replay: typed events, as those of `piecework.events`."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.events import Event


@dataclass(frozen=True, kw_only=True)
class Captured(Event):
    """One size of one phase was captured; bytes as predicted before, and as measured after."""

    phase: str
    form: str
    size: int
    segments: int
    graphs: int
    predicted_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaptureSkipped(Event):
    """A size was not captured, because it would not have fitted the budget."""

    phase: str
    size: int
    predicted_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaptureFailed(Event):
    """A size could not be captured on its first use or in idle time; the program itself goes on serving it."""

    phase: str
    size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Lowered(Event):
    """A phase is captured in a lesser way than asked for, which the caller allowed; names the operators."""

    phase: str
    asked: str
    capture: str
    operators: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Replayed(Event):
    """A call was served by a captured size, and why by that one."""

    phase: str
    form: str
    size: int
    num_tokens: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Uncovered(Event):
    """A call was served by no captured size, and why; the program ran it without graphs."""

    phase: str
    num_tokens: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Moved(Event):
    """Memory that graphs read is not where it was at capture; the step's result was not handed out."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Refreshed(Event):
    """What had moved was copied back in place, or sizes were captured anew."""

    copied: tuple[str, ...]
    recaptured: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Released(Event):
    """All graphs and their memory were given back."""

    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Unowned(Event):
    """Graphs read memory that no known owner holds: it is kept alive, but whether it is still right nobody can tell."""

    names: tuple[str, ...]
