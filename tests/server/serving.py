"""A real server on a tiny model in this process, and small clients for it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from e2e.command import llama_folder
from piecework.api.serving import open_engine
from piecework.engine.loop import Engine
from piecework.engine.manifest import Specialisation
from piecework.engine.options import EngineOptions
from piecework.engine.prewarm import WatchedRunner, run_shapes, watch_misses, watch_shapes
from piecework.engine.service import Report, Service
from piecework.engine.shapes import Coverage, StepShape
from piecework.server.front import Front
from piecework.server.generation import ServedModel
from piecework.server.metrics import Metrics
from piecework.server.options import ServeOptions
from piecework.server.readiness import Readiness
from piecework.server.run import Plan, Stop, serve
from piecework.server.template import read_template
from piecework.server.words import Words

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w3{% endif %}"
)
NAME = "tiny"
ENGINE = EngineOptions(num_pages=128, max_num_sequences=16, max_num_batched_tokens=64, enforce_eager=True)


@dataclass
class Running:
    """A server that runs: its address, and what can be looked at from inside."""

    front: Front
    folder: Path
    stop: Stop
    url: str = ""
    code: int | None = None
    error: Exception | None = None
    engine: Engine | None = None
    runner: WatchedRunner | None = None
    misses: list[Specialisation] = field(default_factory=list)
    service: Service | None = None
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **given: Any) -> openai.OpenAI:
        """Return the real client."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60, **given}
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", **settings))
        return self.clients[-1]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Send one request; return status, headers (names in lower case) and the body, read as JSON where it is."""
        return ask(self.port, method, path, body, **headers)

    def wait_idle(self) -> None:
        """Wait until the engine holds no page."""
        assert self.service is not None
        end = time.monotonic() + 20
        while time.monotonic() < end:
            status = self.service.status
            if not status.num_running and not status.num_waiting and status.num_free_pages == status.num_pages:
                return
            time.sleep(0.01)
        raise AssertionError(f"pages are still held: {self.service.status}")


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Send one request to a port of this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = json.dumps(body) if isinstance(body, dict | list) else body
    given = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, sent, given)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    found = {name.lower(): value for name, value in answer.getheaders()}
    return answer.status, found, json.loads(text) if "json" in found.get("content-type", "") else text.decode()


def tiny_folder(folder: Path) -> Path:
    """Write the tiny model, with a chat template."""
    folder.mkdir(exist_ok=True)
    llama_folder(folder, eos_token_id=None)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class _Start:
    """A start as the command's, with what a test puts between."""

    def __init__(
        self,
        found: Running,
        engine: EngineOptions,
        shapes: tuple[StepShape, ...],
        manifest: Path | None,
        before_engine: threading.Event | None,
        alter: Callable[[Engine], None],
    ) -> None:
        self.found, self.engine, self.shapes, self.manifest = found, engine, shapes, manifest
        self.before_engine, self.alter = before_engine, alter
        self.opened, self.done = threading.Event(), threading.Event()
        self.watches = ExitStack()

    def make_engine(self, report: Report, hear: Report) -> Engine:
        """Open the engine as the command does."""
        if self.before_engine is not None:
            self.before_engine.wait(60)
        engine = open_engine(self.found.folder, engine=self.engine, report=hear)
        self.alter(engine)
        self.found.engine = engine
        self.found.runner = watch_shapes(engine, self.found.front.coverage)
        run_shapes(engine, self.found.runner, self.shapes, hear)
        return engine

    def start_service(self, hear: Report) -> Service:
        """Start the engine's thread."""
        self.found.service = Service(lambda report: self.make_engine(report, hear)).start()
        return self.found.service

    def describe(self, service: Any) -> Any:
        """Return the model and its template."""
        made = self.found.engine
        assert made is not None
        words = Words(made.served.tokenizer, made.served.vocabulary_size)
        return ServedModel(service, words, made.max_length, NAME), read_template(self.found.folder)

    def before_ready(self) -> None:
        """Watch what compiles from now on."""
        self.found.front.coverage.arm()
        self.watches.enter_context(watch_misses(lambda: self.found.runner, self.manifest, self.hear))

    def hear(self, miss: Specialisation) -> None:
        """Keep a miss for the test, and tell the server."""
        self.found.misses.append(miss)
        self.found.front.misses.add(miss)

    def open(self, url: str) -> None:
        """Note the address."""
        self.found.url = url
        self.opened.set()

    def main(self) -> None:
        """Serve until the end is asked for."""
        plan = Plan(self.start_service, self.describe, self.before_ready, when_open=self.open)
        try:
            self.found.code = serve(self.found.front, plan, self.found.stop)
        except Exception as error:  # noqa: BLE001  raised where the server was asked for
            self.found.error = error
        finally:
            self.opened.set()
            self.done.set()


@contextmanager
def running(
    folder: Path,
    *,
    engine: EngineOptions = ENGINE,
    shapes: tuple[StepShape, ...] = (),
    manifest: Path | None = None,
    before_engine: threading.Event | None = None,
    alter: Callable[[Engine], None] = lambda engine: None,
    wait: bool = True,
    **options: Any,
) -> Iterator[Running]:
    """Serve a folder until the block ends; `before_engine` holds the start back until it is set."""
    given = ServeOptions(**{"port": 0, "served_model_names": (NAME,), "drain_timeout_s": 10, **options})
    front = Front(given, Readiness(), Metrics(NAME), coverage=Coverage())
    found = Running(front, folder, Stop())
    start = _Start(found, engine, shapes, manifest, before_engine, alter)
    thread = threading.Thread(target=start.main)
    thread.start()
    try:
        assert start.opened.wait(60)
        end = time.monotonic() + 60
        while wait and not front.readiness.is_ready and not start.done.is_set() and time.monotonic() < end:
            time.sleep(0.01)
        if wait and found.error is not None:
            raise found.error
        yield found
    finally:
        if before_engine is not None:
            before_engine.set()
        found.stop.set()
        thread.join(60)
        for client in found.clients:
            client.close()
        start.watches.close()
        assert not thread.is_alive()
