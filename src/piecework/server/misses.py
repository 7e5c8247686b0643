"""The compiles that were caught since the server was ready, as the metrics and the live page tell of them."""

from __future__ import annotations

from collections import deque

from piecework.engine.manifest import Specialisation
from piecework.server.metrics import Metrics

_KEPT = 50


class Misses:
    """Counts compiles, and keeps the latest of them in words. Any thread may add one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._latest: deque[str] = deque(maxlen=_KEPT)
        self.count = 0

    def add(self, found: Specialisation) -> None:
        """Take note of one."""
        self.count += 1
        self._latest.appendleft(str(found))
        self._metrics.misses.labels(found.kind).inc()

    def latest(self) -> list[str]:
        """Return the latest, newest first."""
        return list(self._latest)
