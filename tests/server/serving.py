"""A real server on a tiny model in this process, and small clients for it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
ENGINE = EngineOptions(num_pages=128, max_num_sequences=16, max_num_batched_tokens=64)


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


@contextmanager
def running(
    folder: Path,
    *,
    engine: EngineOptions = ENGINE,
    shapes: tuple[StepShape, ...] = (),
    manifest: Path | None = None,
    before_engine: threading.Event | None = None,
    alter: Any = lambda engine: None,
    wait: bool = True,
    **options: Any,
) -> Iterator[Running]:
    """Serve a folder until the block ends; `before_engine` holds the start back until it is set."""
    given = ServeOptions(**{"port": 0, "served_model_names": (NAME,), "drain_timeout_s": 10, **options})
    coverage = Coverage()
    front = Front(given, Readiness(), Metrics(NAME), coverage=coverage)
    found = Running(front, folder, Stop())
    opened, done = threading.Event(), threading.Event()
    watches: list[Any] = []

    def make_engine(report: Report) -> Engine:
        if before_engine is not None:
            before_engine.wait(60)
        found.engine = open_engine(folder, engine=engine, report=report)
        alter(found.engine)
        found.runner = watch_shapes(found.engine, coverage)
        run_shapes(found.engine, found.runner, shapes, report)
        return found.engine

    def start_service() -> Service:
        found.service = Service(make_engine).start()
        return found.service

    def describe(service: Any) -> Any:
        made = found.engine
        assert made is not None
        words = Words(made.served.tokenizer, made.served.vocabulary_size)
        return ServedModel(service, words, made.max_length, NAME), read_template(folder)

    def before_ready() -> None:
        coverage.arm()
        watch = watch_misses(lambda: found.runner, manifest, found.misses.append)
        watch.__enter__()
        watches.append(watch)

    def main() -> None:
        try:
            plan = Plan(start_service, describe, before_ready, lambda url: None, opened_at)
            found.code = serve(front, plan, found.stop)
        except Exception as error:  # noqa: BLE001  raised where the server was asked for
            found.error = error
        finally:
            opened.set()
            done.set()

    def opened_at(url: str) -> None:
        found.url = url
        opened.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert opened.wait(60)
        end = time.monotonic() + 60
        while wait and not front.readiness.is_ready and not done.is_set() and time.monotonic() < end:
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
        for watch in watches:
            watch.__exit__(None, None, None)
        assert not thread.is_alive()
