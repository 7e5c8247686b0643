"""Capture in idle gaps: as many sizes as a budget of time allows."""

from __future__ import annotations

import time
from typing import Protocol

from piecework.errors import CaptureError
from piecework.runtime.permission import check_permission


class Capturable(Protocol):
    """What has sizes left to capture."""

    @property
    def pending(self) -> tuple[tuple[str, int], ...]: ...

    def capture(self, phase: str, size: int) -> None: ...

    def note_failure(self, phase: str, size: int, error: CaptureError) -> None: ...


def capture_within(program: Capturable, budget_ms: float) -> tuple[tuple[str, int], ...]:
    """Capture pending sizes one after another while the next is expected to end within the budget.

    What the next one takes is taken to be what the last one took; the first is tried whatever it takes. A size that
    fails is noted and left to the program.
    """
    check_permission("sizes")
    done: list[tuple[str, int]] = []
    began, longest_s = time.perf_counter(), 0.0
    for phase, size in program.pending:
        started = time.perf_counter()
        if done and (started - began + longest_s) * 1e3 > budget_ms:
            break
        try:
            program.capture(phase, size)
            done.append((phase, size))
        except CaptureError as error:
            program.note_failure(phase, size, error)
        longest_s = max(longest_s, time.perf_counter() - started)
    return tuple(done)
