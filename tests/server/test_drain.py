"""A server that is asked to end answers what is under way, and takes nothing new."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest

from server.serving import NAME, ask, running

PROMPT = "w5 w6 w7 w8"


def test_open_streams_end_and_new_requests_are_refused(folder: Path) -> None:
    with running(folder) as server:
        client = server.client()
        stream = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=250, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = [next(iter(stream))]
        server.stop.set()
        while server.front.readiness.phase != "draining":
            time.sleep(0.001)
        with pytest.raises(openai.InternalServerError, match="the model is not served now: draining"):
            client.completions.create(model=NAME, prompt=PROMPT)
        assert server.ask("GET", "/readyz")[0] == 503
        assert server.ask("GET", "/livez")[0] == 200
        pieces += stream
        assert len(pieces) == 250 and pieces[-1].choices[0].finish_reason == "length"
    assert server.code == 0


def test_who_does_not_end_in_time_is_told(folder: Path) -> None:
    with running(folder, drain_timeout_s=0, alter=slow) as server:
        stream = server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=250, stream=True)
        next(iter(stream))
        server.stop.set()
        with pytest.raises(openai.APIError, match="the engine is going"):
            list(stream)
    assert server.code == 0


def slow(engine: object) -> None:
    """Make each step take a while."""

    class Slow:
        def __init__(self, runner: object) -> None:
            self.runner = runner

        def run(self, batch: object) -> object:
            time.sleep(0.02)
            return self.runner.run(batch)  # type: ignore[attr-defined]

    engine.runner = Slow(engine.runner)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_command_drains_on_sigterm(folder: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "piecework.cli.main", "serve", str(folder), "--port", "0", "--enforce-eager"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
        reader.start()
        try:
            port = int(wait_for(lines, r"listening at http://127\.0\.0\.1:(\d+)"))
            assert ask(port, "GET", "/livez")[0] == 200  # long before the model is there
            wait_for(lines, r"INFO (serving) ")
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
                stream = client.completions.create(model=folder.name, prompt=PROMPT, max_tokens=250, stream=True)
                pieces = [next(iter(stream))]
                process.send_signal(signal.SIGTERM)
                pieces += stream
            assert len(pieces) == 250
            assert process.wait(30) == 0
        finally:
            process.kill()
        reader.join(10)
        assert not any("Traceback" in line for line in lines), "".join(lines)
        assert [line for line in lines if "answers are under way" in line]


def wait_for(lines: list[str], pattern: str) -> str:
    """Wait for a line of the log, and return its first group."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for line in list(lines):
            if found := re.search(pattern, line):
                return found[1]
        time.sleep(0.05)
    raise AssertionError("".join(lines))
