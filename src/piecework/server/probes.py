"""What is asked of a server rather than of its model: probes, metrics, names, version."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response

import piecework
from piecework.engine.sequence import Request, SamplingParameters
from piecework.errors import PieceworkError
from piecework.server.answers import ModelCard, ModelList, Probe, Version
from piecework.server.bodies import Json
from piecework.server.faults import Refusal
from piecework.server.front import REFUSALS, Front
from piecework.server.metrics import CONTENT_TYPE
from piecework.server.readiness import FAILED

_FRESH_S = 5.0  # a token that came so lately proves as much as one that is asked for
_UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": Probe, "description": "Not ready; the body says how far it is."}
}


def make_router(front: Front) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["server"])

    def told(is_well: bool) -> Json:
        retry = {} if is_well else {"Retry-After": str(front.readiness.retry_after_s)}
        return Json(front.readiness.as_dict(), 200 if is_well else 503, retry)

    @router.get("/livez", response_model=Probe, responses=_UNREADY)
    async def livez() -> Response:
        """Say whether the process should go on: 503 once the start, or the engine, has failed for good."""
        return told(front.readiness.phase != FAILED)

    @router.get("/readyz", response_model=Probe, responses=_UNREADY)
    async def readyz() -> Response:
        """Say whether requests are taken, which phase the start is in, and how far that is."""
        return told(front.readiness.is_ready)

    @router.get("/health", response_model=Probe, responses=_UNREADY)
    async def health() -> Response:
        """Say whether a real forward pass gives a token: one that came of late, or one that is computed now."""
        if not front.readiness.is_ready:
            return told(False)
        fault = await _forward_fault(front)
        if fault:
            body = {**front.readiness.as_dict(), "ready": False, "detail": fault}
            return Json(body, 503, {"Retry-After": str(front.readiness.retry_after_s)})
        return told(True)

    @router.get("/v1/models", responses=REFUSALS)
    async def models() -> ModelList:
        """List the names that may stand in `model`; 503 until requests are taken."""
        return ModelList(data=[_card(front, name) for name in _names(front)])

    @router.get("/v1/models/{model:path}", responses=REFUSALS)
    async def one_model(model: str) -> ModelCard:
        """Tell of one name."""
        if model not in _names(front):
            front.check_model(model)
        return _card(front, model)

    @router.get("/version")
    async def version() -> Version:
        """Say which release serves."""
        return Version(version=piecework.__version__)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text form."""
        front.metrics.ready.set(front.readiness.is_ready)
        front.metrics.cover(front.coverage.num_covered, front.coverage.num_met)
        return Response(front.metrics.text(), media_type=CONTENT_TYPE)

    return router


def _names(front: Front) -> list[str]:
    front.gate.check_ready()
    return list(front.names)


def _card(front: Front, name: str) -> ModelCard:
    model = front.model
    return ModelCard(id=name, created=front.created, root=model.root, max_model_len=model.max_length)


async def _forward_fault(front: Front) -> str:
    """Return what is wrong with the engine; empty where it gives tokens."""
    if front.metrics.clock() - front.metrics.last_output < _FRESH_S:
        return ""
    limit_s = front.options.health_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            await forward_once(front)
    except TimeoutError:
        return f"no token came within {limit_s:g} seconds"
    except PieceworkError as error:
        return error.message
    return ""


async def forward_once(front: Front) -> None:
    """Compute one token through the engine; raise what keeps it from coming."""
    model = front.loaded
    request = Request(f"health-{uuid.uuid4().hex}", (0,), SamplingParameters(max_tokens=1))
    async with aclosing(model.service.generate(request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if output.finish_reason == "abort":
                raise Refusal(503, "the engine gave up the probe's request", hint="the server's log has the reason")
    front.metrics.last_output = front.metrics.clock()
