"""What every request passes before its route: an id, the key, and limits of size and time."""

from __future__ import annotations

import asyncio
import re
import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from piecework.server.bodies import Json
from piecework.server.faults import Refusal
from piecework.server.options import ServeOptions

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Answered without a key: probes and scrapers have none.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics", "/version"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Entrance:
    """The outermost layer of the application.

    Each answer carries `X-Request-Id`: the client's own, where it is one, else a new one. A body is read whole before
    any route sees it: one that is too long or comes too slowly is refused here, and so is a client without a key. A
    client that does not read its answer is given up.
    """

    def __init__(self, application: Application, options: ServeOptions) -> None:
        self._application = application
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            async with asyncio.timeout(self._options.write_timeout_s):
                await send(message)

        try:
            self._check_key(scope)
            self._check_length(scope)
            body = await self._read(receive)
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, answer)
            return
        if body is not None:
            await self._application(scope, _replay(body, receive), answer)

    def _check_key(self, scope: Scope) -> None:
        keys = self._options.api_keys
        if not keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        given = _header(scope["headers"], b"authorization") or b""
        kind, _, token = given.partition(b" ")
        same = [secrets.compare_digest(token.strip(), key.encode()) for key in keys]  # each is compared: no early end
        if kind.lower() == b"bearer" and any(same):
            return
        raise Refusal(
            401,
            "no valid API key was given",
            hint="send `Authorization: Bearer KEY`, with a key that the server was started with",
            code="invalid_api_key",
        )

    def _check_length(self, scope: Scope) -> None:
        given = _header(scope["headers"], b"content-length")
        if given is not None and given.isdigit() and (len(given) > 18 or int(given) > self._options.max_body_bytes):
            raise _too_long(self._options.max_body_bytes)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the whole body; None where the client went away while sending it."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._options.max_body_bytes:
                        raise _too_long(self._options.max_body_bytes)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise Refusal(
                408,
                f"the body did not come within {self._options.body_timeout_s:g} seconds",
                hint="send it at once; the server's `--body-timeout-s` is the limit",
                code="slow_body",
            ) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that gives the body first, then what really comes: the client's going away."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    headers = refusal.headers | ({"Connection": "close"} if refusal.status in (408, 413) else {})
    await Json(refusal.body(), refusal.status, headers)(scope, receive, send)


def _too_long(limit: int) -> Refusal:
    return Refusal(
        413,
        f"the body is longer than {limit} bytes",
        hint="send less; the server's `--max-body-bytes` is the limit",
        code="body_too_long",
    )


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    given = _header(headers, b"x-request-id")
    return given.decode() if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
