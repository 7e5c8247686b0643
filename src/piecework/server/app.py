"""The HTTP application: its routes, and the one form in which all of them fail."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import piecework
from piecework.errors import PieceworkError
from piecework.server import chat, completions, page, probes, tokens
from piecework.server.bodies import Json
from piecework.server.events import Gone
from piecework.server.faults import error_body, invalid_fields, refused
from piecework.server.front import Front
from piecework.server.middleware import Application, Entrance

log = logging.getLogger(__name__)
_GONE = 499  # nobody reads it: the client had left


def make_app(front: Front) -> Application:
    """Return the whole application."""
    app = FastAPI(
        title="Piecework",
        version=piecework.__version__,
        description="An OpenAI-compatible server over Piecework's engine.",
        docs_url=None,
        redoc_url=None,
    )
    for part in (completions, chat, tokens, probes, page):
        app.include_router(part.make_router(front))
    _shape_failures(app)
    return Entrance(_Counted(app, front), front.options)


class _Counted:
    """Counts each answer by its route and status."""

    def __init__(self, app: FastAPI, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and look at the status of its answer."""

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._front.metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, watched)


def _shape_failures(app: FastAPI) -> None:
    """Give every failure OpenAI's body."""

    @app.exception_handler(PieceworkError)
    async def ours(request: Request, error: PieceworkError) -> Response:
        refusal = refused(error)
        if refusal.status == 500:
            log.error("%s %s: %s", request.method, request.url.path, error.message)
        return Json(refusal.body(), refusal.status, refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        refusal = invalid_fields(error.errors())
        return Json(refusal.body(), refusal.status)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        said = {404: f"there is no `{request.url.path[:200]}` here", 405: f"`{request.method}` is not taken here"}
        hint = "`/openapi.json` lists the routes" if error.status_code in said else ""
        message = said.get(error.status_code, str(error.detail))
        return Json(error_body(error.status_code, message, hint), error.status_code, error.headers)

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return Response(status_code=_GONE)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        body = error_body(500, f"{type(error).__name__}: {error}", "the server's log has the traceback")
        return Json(body, 500)


