"""How far a start is, and whether requests are taken: what the probes, the log and the live page tell."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

log = logging.getLogger(__name__)

STARTING, LOADING, TRACING, COMPILING, CAPTURING, CHECKING = (
    "starting", "loading", "tracing", "compiling", "capturing", "checking",
)  # fmt: skip
PREWARMING = "prewarming"
READY, DRAINING, FAILED = "ready", "draining", "failed"
_UNDER_WAY = (STARTING, LOADING, TRACING, COMPILING, CAPTURING, PREWARMING, CHECKING)


@dataclass(frozen=True)
class Progress:
    """One phase: what is done of how much, in what unit; a total of 0 says that nobody knows."""

    phase: str
    done: int = 0
    total: int = 0
    unit: str = ""
    elapsed_s: float = 0.0

    @property
    def detail(self) -> str:
        """Say it in a few words: `loading 62 %`, `compiling 2/3`, `ready`."""
        if not self.total:
            return self.phase
        if self.unit == "bytes":
            return f"{self.phase} {100 * self.done // self.total} %"
        return f"{self.phase} {self.done}/{self.total}"


class Readiness:
    """The phase that the start is in, those before it, and what goes on beside the serving.

    `phase` decides whether requests are taken. What climbs while the server serves (a compile, a capture) is told of
    as `beside`, and changes nothing about readiness.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._phase_began = clock()
        self._current = Progress(STARTING)
        self._past: list[Progress] = []
        self._beside: dict[str, Progress] = {}
        self.reason = ""

    @property
    def phase(self) -> str:
        return self._current.phase

    @property
    def is_ready(self) -> bool:
        return self._current.phase == READY

    def enter(self, phase: str, total: int = 0, unit: str = "") -> None:
        """Begin a phase; a line of the log tells of it, and how long the one before took."""
        with self._lock:
            if self._current.phase in (DRAINING, FAILED) or phase == self._current.phase:
                return
            now = self._clock()
            ended = replace(self._current, elapsed_s=now - self._phase_began)
            self._past.append(ended)
            self._current, self._phase_began = Progress(phase, 0, total, unit), now
        if ended.phase != READY:
            log.info("%s took %.2f s", ended.phase, ended.elapsed_s)
        log.info("%s", phase)

    def advance(self, done: int, total: int | None = None, unit: str | None = None) -> None:
        """Say how far the phase is."""
        with self._lock:
            known = self._current.total if total is None else total
            unit = self._current.unit if unit is None else unit
            self._current = replace(self._current, done=done, total=known, unit=unit)

    def beside(self, phase: str, done: int, total: int) -> None:
        """Say how far something is that goes on while requests are served."""
        with self._lock:
            self._beside[phase] = Progress(phase, done, total)

    def ready(self) -> None:
        """Take requests from now on."""
        self.enter(READY)

    def drain(self) -> None:
        """Take no more requests; those under way go on."""
        self.enter(DRAINING)

    def fail(self, reason: str) -> None:
        """Say that the server will not be ready, or is no more."""
        self.reason = reason
        self.enter(FAILED)

    def as_dict(self) -> dict[str, Any]:
        """Return what `/readyz` answers."""
        with self._lock:
            now = self._clock()
            current = replace(self._current, elapsed_s=now - self._phase_began)
            phases = [asdict(each) for each in (*self._past, current)]
            beside = [{**asdict(each), "detail": each.detail} for each in self._beside.values()]
        return {
            "ready": current.phase == READY,
            "phase": current.phase,
            "detail": f"{current.detail}: {self.reason}" if self.reason else current.detail,
            "done": current.done if current.total else None,
            "total": current.total or None,
            "elapsed_s": round(now - self._began, 3),
            "phases": phases,
            "beside": beside,
        }

    @property
    def retry_after_s(self) -> int:
        """When to ask again: soon where a start is under way, later where it is the end."""
        return 2 if self.phase in _UNDER_WAY else 5
