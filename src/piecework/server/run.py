"""The life of a server: take the port, bring up the engine, serve, and go down without losing an answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from piecework.engine.options import Progress, Status
from piecework.errors import EngineError, PieceworkError
from piecework.server.app import make_app
from piecework.server.front import Front
from piecework.server.generation import ServedModel, Service
from piecework.server.http import HttpThread, bind
from piecework.server.options import START
from piecework.server.probes import forward_once
from piecework.server.readiness import CHECKING, FAILED, LOADING, READY
from piecework.server.template import ChatTemplate

log = logging.getLogger(__name__)
_LOOK_S = 0.2
_GOODBYE_S = 10.0


class RunningService(Service, Protocol):
    """An engine that can be waited for, and ended."""

    @property
    def failure(self) -> PieceworkError | None: ...

    def wait_ready(self, timeout_s: float | None = None) -> bool: ...

    def close(self, timeout_s: float | None = 30.0) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How a server comes up: how its engine is started, and what becomes of it when it is there.

    `start_service` is given whom to tell how far loading and what follows it are, from any thread.
    """

    start_service: Callable[[Callable[[Progress], None]], RunningService]
    describe: Callable[[RunningService], tuple[ServedModel, ChatTemplate | None]]
    before_ready: Callable[[], None] = lambda: None
    when_ready: Callable[[str], int | None] = lambda url: None
    when_open: Callable[[str], None] = lambda url: None


class Stop:
    """What SIGTERM and SIGINT set; the second signal does not wait for open answers."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.is_hurried = False

    def set(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask for the end."""
        self.is_hurried = self._event.is_set()
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end to be asked for; say whether it was."""
        return self._event.wait(timeout_s)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Be set by signals until the block ends."""
        before = {number: signal.signal(number, self.set) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(front: Front, plan: Plan, stop: Stop) -> int:
    """Serve until the end is asked for; return the exit code. Raises what keeps the engine from coming up.

    `plan.before_ready` is called when the start's own steps are done, and `plan.when_ready` with the address once
    requests are taken; a number that this returns is the exit code of a server that has done what it was started for.
    """
    options = front.options
    http: HttpThread | None = None
    service: RunningService | None = None
    taken = bind(options.host, options.port)  # at once: an address that is taken is told before minutes of loading
    try:
        if options.open_port == START:
            http = _open(front, plan, taken, stop)
        front.readiness.enter(LOADING)
        service = plan.start_service(lambda progress: _tell_phase(front, progress))
        _follow_start(front, service, stop)
        if stop.is_set:
            return 0
        model, template = plan.describe(service)
        front.install(model, template)
        if http is None:
            http = _open(front, plan, taken, stop)
        front.readiness.enter(CHECKING)
        asyncio.run(forward_once(front))
        plan.before_ready()
        front.readiness.ready()
        log.info("serving %s at %s", ", ".join(front.names), http.url)
        code = plan.when_ready(http.url)
        if code is None:
            code = _watch(front, service, http, stop)
        _drain(front, stop)
        service.close(_GOODBYE_S)
        if service.failure is not None:  # in the last answers, or in saying goodbye to other ranks
            raise service.failure
        return code
    except BaseException as error:
        front.readiness.fail(getattr(error, "message", str(error)))
        raise
    finally:
        if service is not None:
            service.close(5.0)
        if http is not None:
            http.stop()
        taken.close()


def _open(front: Front, plan: Plan, taken: socket.socket, stop: Stop) -> HttpThread:
    http = HttpThread(make_app(front), taken)
    http.start(stop.wait)
    log.info("listening at %s", http.url)
    plan.when_open(http.url)
    return http


def _follow_start(front: Front, service: RunningService, stop: Stop) -> None:
    """Tell of the start's progress until the engine is there, or the end is asked for."""
    while not (service.wait_ready(_LOOK_S) and service.status.is_ready):
        if stop.is_set:
            return
        if service.wait_ready(0):  # it is there, and waits for a tier
            _tell_phase(front, service.status.progress)


def _tell_phase(front: Front, progress: Progress) -> None:
    if front.readiness.phase != progress.phase:
        front.readiness.enter(progress.phase, progress.total, progress.unit)
    front.readiness.advance(progress.done, progress.total, progress.unit)


def _watch(front: Front, service: RunningService, http: HttpThread, stop: Stop) -> int:
    """Look after a server that serves, until the end is asked for. Raises what the engine fails with."""
    told: Status | None = None
    while not stop.wait(_LOOK_S):
        if service.failure is not None:
            front.readiness.fail(service.failure.message)
            time.sleep(_LOOK_S)  # those who wait are told before the connections end
            raise service.failure
        if not http.is_alive:
            raise EngineError("the HTTP server has ended", hint="the log has the reason")
        status = service.status
        progress = status.progress
        if progress.phase != READY:
            front.readiness.beside(progress.phase, progress.done, progress.total)
        if told is None or (status.tier, status.trouble) != (told.tier, told.trouble):
            _log_tier(status, told)
        told = status
    return 0


def _log_tier(status: Status, before: Status | None) -> None:
    if before is None or status.tier != before.tier:
        log.info("tier %d serves", status.tier)
    if status.trouble:
        log.warning("a tier has failed: %s; the last good one serves", status.trouble)


def _drain(front: Front, stop: Stop) -> None:
    """Take no more requests, and wait for those under way as long as the options say."""
    if front.readiness.phase == FAILED:
        return
    front.readiness.drain()
    end = time.monotonic() + front.options.drain_timeout_s
    waiting = front.gate.num_inside
    if waiting:
        log.info("%d answers are under way; they have %g seconds", waiting, front.options.drain_timeout_s)
    while front.gate.num_inside and time.monotonic() < end and not stop.is_hurried:
        time.sleep(0.02)
    if front.gate.num_inside:
        log.warning("%d answers did not end in time", front.gate.num_inside)
