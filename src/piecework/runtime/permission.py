"""Whether graphs may be captured now: an engine forbids it while it serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from piecework.errors import CaptureError


class Permission:
    """Forbid something in the whole process, in all threads, for as long as any block of `forbid` is open."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def forbid(self, reason: str) -> Iterator[None]:
        with self._lock:
            self._reasons.append(reason)
        try:
            yield
        finally:
            with self._lock:
                self._reasons.remove(reason)

    @property
    def reason(self) -> str:
        """Why it is forbidden now; empty where it is not."""
        return self._reasons[-1] if self._reasons else ""


capturing = Permission()


@contextmanager
def no_capture(reason: str = "no_capture() is in force") -> Iterator[None]:
    """Forbid capture in the whole process until the block ends: what would capture raises CaptureError instead."""
    with capturing.forbid(reason):
        yield


def check_permission(what: str) -> None:
    """Raise CaptureError where capture is forbidden."""
    if capturing.reason:
        raise CaptureError(
            f"{what} may not be captured now: {capturing.reason}",
            hint="capture before serving, or by capture_some() where it is allowed",
        )
