"""What is observed below the phases of the line: parts of them, by whom is given no observer, and imports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from piecework.events import Event
from piecework.spans import span_observer, spanning


@dataclass(frozen=True, kw_only=True)
class SubPhase(Event):
    """A part of a phase ended, told by what has no observer of its own: a compiler, a library, a loader."""

    name: str
    detail: str = ""


@contextmanager
def sub_phase(name: str, detail: str = "") -> Iterator[None]:
    """Emit a `SubPhase` to whoever observes the span around the block; nothing where nobody does."""
    observer = span_observer()
    if observer is None:
        yield
        return
    start_ns, number = time.perf_counter_ns(), 0
    try:
        with spanning(observer) as number:
            yield
    finally:
        observer(SubPhase(name=name, detail=detail, start_ns=start_ns, span=number))


@contextmanager
def waiting(lock: AbstractContextManager[Any], what: str) -> Iterator[None]:
    """Hold a lock for the block; the time until it is had is a sub-phase of its own."""
    with ExitStack() as held:
        with sub_phase("wait", what):
            held.enter_context(lock)
        yield


@dataclass(frozen=True, kw_only=True)
class Imported(Event):
    """A package was imported, with what it imported in turn; a package of ours is told of module by module."""

    package: str
    modules: int
