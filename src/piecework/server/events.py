"""Answers that come piece by piece: server-sent events, ended when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from piecework.errors import PieceworkError
from piecework.server.faults import error_body, refused

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def event(value: Mapping[str, Any], name: str = "") -> bytes:
    """Write one event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(errors="replace")


class EventStream(Response):
    """Send what a generator yields, and close it at once where the client goes away or reads no more.

    `leave` is called when all is over, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], leave: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until nobody listens."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            is_sent = await self._send_while_read(receive, send)
        finally:
            self._leave()
        if is_sent:
            with contextlib.suppress(TimeoutError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_while_read(self, receive: Receive, send: Send) -> bool:
        """Send until the end, and say whether it was reached."""
        async with contextlib.aclosing(self._events):
            sending = asyncio.ensure_future(self._send(send))
            listening = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait({sending, listening}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                is_sent = sending.done()
                for task in (sending, listening):
                    task.cancel()
                # A client that does not read makes `send` time out; there is nobody to tell.
                with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                    await sending
                with contextlib.suppress(asyncio.CancelledError):
                    await listening
        return is_sent

    async def _send(self, send: Send) -> None:
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def guarded(events: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield events; where one fails, tell the client as an event: the status went out before."""
    try:
        async for chunk in events:
            yield chunk
    except PieceworkError as error:
        yield event(refused(error).body())
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, OSError) as error:
        yield event(error_body(500, f"{type(error).__name__}: {error}", "the server's log has the rest"))
    yield DONE


class Gone(Exception):
    """The client went away before its answer was there."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` gives; cancel it and raise Gone where the client goes away before."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Gone
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.wait({working, listening})
        if not working.cancelled():
            working.exception()  # so that nobody is told of an error that nobody waited for


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
