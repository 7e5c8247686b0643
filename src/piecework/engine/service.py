"""A thread that steps an engine, and an async iterator for each request: what a server stands on."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from piecework.engine.loop import Engine
from piecework.engine.options import Progress, Status
from piecework.engine.sequence import Output, Request
from piecework.errors import EngineError, PieceworkError

Report = Callable[[Progress], None]
IDLE_S = 0.005
Command = Callable[[Engine], None]


@dataclass(frozen=True)
class _Listener:
    """Where a request's outputs go: a queue in the loop of whoever waits for them."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[Output | PieceworkError]

    def put(self, item: Output | PieceworkError) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)


class Service:
    """Make an engine in a thread of its own and step it there.

    `make_engine` is called in that thread with a function that takes progress, so that a server can answer before the
    weights are in. Everything but the methods here is that thread's own.
    """

    def __init__(self, make_engine: Callable[[Report], Engine]) -> None:
        self._make_engine = make_engine
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        self._engine: Engine | None = None
        self._progress = Progress("loading", 0, 0)
        self._failure: PieceworkError | None = None
        self._is_closing = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="piecework-engine", daemon=True)

    def start(self) -> Service:
        """Start the thread; return at once."""
        self._thread.start()
        return self

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the engine is there, or has failed; raise what it failed with. False where time ran out."""
        is_there = self._started.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return is_there

    @property
    def engine(self) -> Engine | None:
        """The engine once it is there: to read its options and limits."""
        return self._engine

    @property
    def failure(self) -> PieceworkError | None:
        """What ended the service, if anything did."""
        return self._failure

    @property
    def status(self) -> Status:
        """Where the engine stands; before it is there, how far loading is."""
        engine = self._engine
        if engine is None or self._failure is not None:
            trouble = self._failure.message if self._failure is not None else ""
            return Status(is_ready=False, progress=self._progress, trouble=trouble)
        return engine.status

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """Yield what comes for a request until all its answers have ended; leaving early aborts it.

        Raises OptionError where it can never be answered, and EngineError where the engine is not there or has failed.
        """
        engine = self._engine
        if engine is None or self._failure is not None or self._is_closing:
            raise self._absent()
        if request.parameters.json_schema:  # reading a schema takes longer than whoever else waits should wait
            await asyncio.to_thread(engine.check, request)
        else:
            engine.check(request)
        if request.id in self._listeners:
            raise EngineError(f"request `{request.id}` is under way already", hint="give each request an id of its own")
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        self._listeners[request.id] = listener
        if self._failure is not None:  # it failed before it could see the listener
            listener.put(self._failure)
        open_answers = request.parameters.n
        try:
            self._commands.put(lambda engine: self._submit(engine, request))
            while open_answers:
                item = await listener.outputs.get()
                if isinstance(item, PieceworkError):
                    open_answers = 0
                    raise item
                open_answers -= item.finish_reason is not None
                yield item
        finally:
            self._listeners.pop(request.id, None)
            if open_answers:
                self._commands.put(lambda engine: engine.abort(request.id))

    def abort(self, request_id: str) -> None:
        """End a request; its iterator gets an output that says so. May be called by any thread."""
        self._commands.put(lambda engine: engine.abort(request_id))

    def close(self, timeout_s: float | None = 30.0) -> None:
        """End all requests and the thread."""
        self._is_closing = True
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _submit(self, engine: Engine, request: Request) -> None:
        try:
            engine.submit(request)
        except PieceworkError as error:
            self._tell(request.id, error)

    def _absent(self) -> PieceworkError:
        if self._failure is not None:
            return EngineError(f"the engine has failed: {self._failure.message}", hint=self._failure.hint)
        state = "is going" if self._is_closing else f"is not there yet ({self._progress})"
        return EngineError(f"the engine {state}", hint="ask again when it is ready")

    def _main(self) -> None:
        try:
            self._engine = self._make_engine(self._note)
        except Exception as error:  # noqa: BLE001  whatever it is, whoever waits has to be told
            self._fail(error)
            return
        finally:
            self._started.set()
        engine = self._engine
        try:
            while self._take_commands(engine):
                for output in engine.step():
                    self._tell(output.request_id, output)
            engine.close()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
            engine.fail(error)
            return
        for name in list(self._listeners):
            self._tell(name, self._absent())

    def _take_commands(self, engine: Engine) -> bool:
        """Do what was asked for; with nothing to do, wait for it. False when the thread is to end."""
        while True:
            try:
                if engine.has_work:
                    command = self._commands.get_nowait()
                else:
                    command = self._commands.get(timeout=IDLE_S if engine.has_background_work else engine.patience_s)
            except queue.Empty:
                if engine.has_work:
                    return True
                engine.idle()
                continue
            if command is None:
                return False
            command(engine)

    def _note(self, progress: Progress) -> None:
        self._progress = progress

    def _tell(self, request_id: str, item: Output | PieceworkError) -> None:
        listener = self._listeners.get(request_id)
        if listener is not None:
            listener.put(item)

    def _fail(self, error: Exception) -> None:
        failure = error if isinstance(error, PieceworkError) else EngineError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error if failure is not error else error.__cause__
        self._failure = failure
        for name in list(self._listeners):
            self._tell(name, failure)
