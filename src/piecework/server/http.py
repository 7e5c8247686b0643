"""The HTTP server in a thread of its own: the main thread keeps the signals, and the engine its own thread."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable

import uvicorn

from piecework.errors import EngineError, OptionError
from piecework.server.middleware import Application

log = logging.getLogger(__name__)
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Take an address; raise OptionError that says why it is not to be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise OptionError(f"`{host}` is no address: {error}", hint="`127.0.0.1`, or `0.0.0.0` for all") from error
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(_BACKLOG)
    except OSError as error:
        taken.close()
        hint = "another server has it: `--port` gives another" if error.errno == errno.EADDRINUSE else "give another"
        raise OptionError(f"`{host}:{port}` cannot be taken: {error.strerror}", hint=hint) from error
    return taken


class HttpThread:
    """Serves an application on a socket until it is stopped."""

    def __init__(self, application: Application, taken: socket.socket) -> None:
        self._socket = taken
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
            h11_max_incomplete_event_size=64 << 10,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="piecework-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}"

    def start(self, tick: Callable[[float], bool]) -> None:
        """Start, and return when it answers; `tick` waits a moment, and says whether to give up."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise EngineError(f"the HTTP server did not start: {self._failure}", hint="the log has the reason")
            if tick(0.01):
                return

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Answer what is under way, take nothing more, and end."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._socket.close()

    def _main(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except BaseException as error:  # noqa: BLE001  told to whoever waits for the start
            self._failure = error
            log.error("the HTTP server ended: %s", error)
