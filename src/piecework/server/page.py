"""The live page: what the server is doing, told by server-sent events while it changes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response

from piecework.server.events import EventStream, event
from piecework.server.front import Front
from piecework.server.readiness import DRAINING, FAILED

PERIOD_S = 0.5
_KEPT_S = 5.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def make_router(front: Front) -> APIRouter:
    """Return the routes: the page, and the events that it reads."""
    router = APIRouter(include_in_schema=False)
    asked = Snapshot(front)
    text = files("piecework.server").joinpath("page.html").read_text(encoding="utf-8")

    @router.get("/piecework")
    async def page() -> Response:
        """Return the page."""
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": _POLICY})

    @router.get("/piecework/state")
    async def state() -> dict[str, Any]:
        """Return what the page shows, once."""
        return asked.take()

    @router.get("/piecework/events")
    async def events() -> Response:
        """Tell what the page shows, whenever it changes."""
        return EventStream(_follow(front), {})

    return router


async def _follow(front: Front) -> AsyncGenerator[bytes, None]:
    snapshot = Snapshot(front)
    told: dict[str, Any] = {}
    while True:
        now = snapshot.take()
        shown = {**now, "readiness": {**now["readiness"], "elapsed_s": 0, "phases": now["readiness"]["phases"][:-1]}}
        if shown != told:
            told = shown
            yield event(now, "state")
        else:
            yield b": nothing new\n\n"
        if front.readiness.phase in (DRAINING, FAILED):
            return
        await asyncio.sleep(PERIOD_S)


class Snapshot:
    """Reads what the page shows; speeds are of the last seconds between readings."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._counts: deque[tuple[float, dict[int, int]]] = deque()

    def take(self) -> dict[str, Any]:
        """Return the state of now."""
        front = self._front
        return {
            "model": front.names[0],
            "readiness": front.readiness.as_dict(),
            "engine": self._engine(),
            "tiers": self._tiers(),
            "sizes": front.coverage.rows(),
            "misses": {"count": front.misses.count, "latest": front.misses.latest()},
            "cover": {
                "ratio": front.coverage.ratio,
                "met": front.coverage.num_met,
                "uncovered": list(front.coverage.uncovered),
            },
        }

    def _engine(self) -> dict[str, Any]:
        if not self._front.has_model:
            return {"running": 0, "waiting": 0, "pages": 0, "pages_used": 0, "tier": 0, "trouble": ""}
        status = self._front.loaded.service.status
        return {
            "running": status.num_running,
            "waiting": status.num_waiting,
            "pages": status.num_pages,
            "pages_used": status.num_pages - status.num_free_pages,
            "tier": status.tier,
            "trouble": status.trouble,
        }

    def _tiers(self) -> list[dict[str, Any]]:
        now, counts = self._front.metrics.clock(), dict(self._front.metrics.tokens_by_tier)
        self._counts.append((now, counts))
        while len(self._counts) > 1 and self._counts[0][0] < now - _KEPT_S:
            self._counts.popleft()
        since, before = self._counts[0]
        elapsed_s = now - since
        return [
            {
                "tier": tier,
                "tokens": count,
                "tokens_per_s": round((count - before.get(tier, 0)) / elapsed_s, 1) if elapsed_s else 0.0,
            }
            for tier, count in sorted(counts.items())
        ]
