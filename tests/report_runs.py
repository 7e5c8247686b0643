"""Runs whose pages are looked at: a toy that missed its stored program by one option, and was captured dry."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import piecework as pw
from capture_toys import DYNAMIC, inputs, toy
from piecework.diagnostics.report.collect import collect
from piecework.diagnostics.run_file import Run, read_run
from piecework.diagnostics.timeline import Timeline
from piecework.events import ignore
from piecework.store.disk import DiskStore
from piecework.values.view import View

LARGEST = 64
DECODE_SIZES, PREFILL_SIZES = (1, 2, 4, 8), (16, 32)


@dataclass(frozen=True)
class Missed:
    """The run, as it was and as its file gives it back, and its view."""

    run: Run
    view: View
    file: Path


def options(**changed: Any) -> pw.CompileOptions:
    """Return options for the toy."""
    values: dict[str, Any] = {"compiler": "eager", "max_num_batched_tokens": LARGEST, "ranges": ((1, LARGEST),)}
    return pw.CompileOptions(**{**values, **changed})


def missed_run(folder: Path, layers: int = 3) -> Missed:
    """Compile a toy, then once more with other ranges, and capture it on the dry device; the second is the run."""
    store = DiskStore(str(folder / "store"), record_uses=False)
    model = toy(layers)
    pw.compile(model, inputs(4), dynamic=DYNAMIC, options=options(), store=store, observer=ignore)
    timeline = Timeline()
    changed = options(ranges=((1, 16), (17, LARGEST)))
    program = pw.compile(model, inputs(4), dynamic=DYNAMIC, options=changed, store=store, observer=timeline)
    chosen = pw.CaptureOptions(
        decode="full", prefill="piecewise", decode_sizes=DECODE_SIZES, prefill_sizes=PREFILL_SIZES
    )
    pw.capture(program, options=chosen, device="dry", observer=timeline)
    timeline.write(folder / "run.json")
    run = read_run(folder / "run.json")
    return Missed(run, collect(run, store, title="a toy <of three> layers"), folder / "run.json")


class Page(HTMLParser):
    """A page read without a browser: the text of each element that has an id, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text: dict[str, str] = {}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "a":
            self.links.append(str(given.get("href")))
        elif "src" in given or tag in ("link", "img", "iframe", "object"):
            self.loads.append(str(given.get("src") or given.get("href")))
        if tag not in ("meta", "link", "br", "img"):
            self._open.append((tag, str(given.get("id") or "")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name:
                self.text[name] = " ".join(f"{self.text.get(name, '')} {data}".split())
