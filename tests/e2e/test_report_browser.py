"""The report page in a real browser: on a phone and a wide screen, light and dark, by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piecework.diagnostics.report.render import render
from report_runs import missed_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    _browser is None, reason="there is no Chromium here; test_report.py reads the page as text"
)

WIDTHS = (390, 1600)
MOST_BYTES = 2_000_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_browser, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "report.html"
    path.write_text(render(missed_run(folder, layers=32).view), encoding="utf-8")
    return path


class Visit:
    """A page that was opened, and all that it complained of or asked for."""

    def __init__(self, browser: Any, file: Path, width: int = 1600, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def background(self) -> list[int]:
        value = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return [int(part) for part in value.removeprefix("rgb(").removesuffix(")").split(",")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_complains_of_nothing(chromium: Any, file: Path, width: int, scheme: str) -> None:
    visit = Visit(chromium, file, width, scheme)
    assert visit.complaints == []
    assert visit.requests == [file.as_uri()]
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert (sum(visit.background()) < 200) is (scheme == "dark")
    assert visit.page.locator(".region").count() == 65
    assert visit.page.locator("a.region").count() == 33
    visit.page.close()


def test_the_page_of_thirty_two_layers_is_small_and_open_in_a_second(chromium: Any, file: Path) -> None:
    assert file.stat().st_size <= MOST_BYTES
    spent_ms = []
    for _ in range(3):
        visit = Visit(chromium, file)
        spent_ms.append(visit.page.evaluate("performance.getEntriesByType('navigation')[0].duration"))
        visit.page.close()
    assert min(spent_ms) <= 1000


def test_three_answers_stand_on_the_first_screen(chromium: Any, file: Path) -> None:
    visit = Visit(chromium, file)
    for name, words in (
        ("longest-piece", "piece "), ("last-miss", "config.options.ranges"), ("without-size-decode", "9-64"),
        ("without-size-prefill", "33-64"),
    ):  # fmt: skip
        answer = visit.page.locator(f"#{name}")
        assert words in answer.inner_text()
        box = answer.bounding_box()
        assert box is not None and box["y"] + box["height"] <= 900
    visit.page.close()


def test_the_keyboard_reaches_everything(chromium: Any, file: Path) -> None:
    visit = Visit(chromium, file)
    focused = "document.activeElement"
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate(f"{focused}.textContent") == "Skip to the content"
    visit.page.locator("a.region").first.focus()
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.evaluate(f"{focused}.title") == "region 2: piece 1"
    visit.page.keyboard.press("End")
    assert visit.page.evaluate(f"{focused}.title") == "region 64: piece 2"
    visit.page.keyboard.press("Enter")
    assert visit.page.url.endswith("#piece-2")
    summary = visit.page.locator("#piece-2 summary").first
    summary.focus()
    visit.page.keyboard.press("Enter")
    assert visit.page.locator("#piece-2 pre").first.is_visible()
    visit.page.close()


def test_the_theme_can_be_switched(chromium: Any, file: Path) -> None:
    visit = Visit(chromium, file)
    before = visit.background()
    visit.page.locator("#theme").click()
    after = visit.background()
    assert sum(before) > 600 > 200 > sum(after)
    visit.page.locator("#theme").click()
    assert visit.background() == before
    visit.page.close()
