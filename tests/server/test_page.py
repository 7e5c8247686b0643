"""The live page in a real browser: it shows what the server does, while it does it."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piecework.engine.manifest import Specialisation
from piecework.engine.shapes import StepShape
from server.serving import NAME, Running, running


def test_the_state_that_the_page_shows(server: Running) -> None:
    server.client().completions.create(model=NAME, prompt="w1 w2 w3", max_tokens=3)
    found = server.ask("GET", "/piecework/state")[2]
    assert (found["model"], found["readiness"]["phase"]) == (NAME, "ready")
    assert found["engine"]["pages"] == 128
    (speed,) = found["tiers"]
    assert speed["tier"] == 0 and speed["tokens"] >= 3
    by_size = {(row["phase"], row["size"]): row for row in found["sizes"]}
    assert by_size["decode", "1"]["warmed"] is True
    assert by_size["prefill", "3-4"]["tier"] == 0


def test_events_come_while_things_change(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /piecework/events HTTP/1.1\r\nHost: a\r\n\r\n")
        with connection.makefile("rb") as stream:
            first = next_state(stream)
            server.client().completions.create(model=NAME, prompt="w1", max_tokens=4)
            second = next_state(stream)
    assert second["tiers"][0]["tokens"] >= sum(each["tokens"] for each in first["tiers"]) + 4
    assert second["tiers"][0]["tokens_per_s"] > 0


def next_state(stream: Any) -> Any:
    """Read up to the next event."""
    while True:
        line = stream.readline()
        assert line
        if line.startswith(b"data: "):
            return json.loads(line[6:])


@pytest.fixture
def browser() -> Iterator[Any]:
    """Start the system's Chromium; skip where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package `playwright`")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("needs Chromium; none is here")
    with playwright.sync_playwright() as api:
        started = api.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.mark.slow
def test_a_browser_shows_the_page_live(browser: Any, folder: Path, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    with running(folder) as server:
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(f"{server.url}/piecework")
        expect(page.locator("#link")).to_have_text("live")
        assert page.inner_text("#state") == "ready"
        assert page.inner_text("#misses") == "0"
        server.client().completions.create(model=NAME, prompt=list(range(3, 43)), max_tokens=9)
        expect(page.locator("#sizes")).to_contain_text("33-64")
        assert "eager" in page.inner_text("#speed") and "not run" in page.inner_text("#sizes")
        # A name that a miss may bring is text, whatever is in it.
        miss = Specialisation("Triton", "<img src=x onerror=alert(1)>", StepShape("prefill", 40, 1, 40))
        server.front.misses.add(miss)
        server.front.readiness.beside("compiling", 2, 3)
        expect(page.locator("#misses")).to_have_text("1")
        assert page.inner_text("#list li") == str(miss)
        assert "compiling 2/3" in page.inner_text("#beside")
        page.screenshot(path=str(tmp_path / "page.png"))
        server.stop.set()
        expect(page.locator("#link")).to_contain_text("does not answer")
        page.close()
    assert [text for text in wrong if "ERR_" not in text] == []
