"""A view as one self-contained page: no network, no library, readable without script."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from piecework.diagnostics.amounts import bytes_text, time_text
from piecework.diagnostics.report.compare import Comparison
from piecework.values.view import View

_FOLDER = files("piecework.diagnostics.report") / "page"
_GOLDEN_ANGLE = 137.508  # hues that follow one another stay far apart, however many there are
_SECTIONS = (
    ("glance", "At a glance"), ("startup", "Start-up"), ("model", "Model"), ("pieces", "Pieces"), ("ranges", "Ranges"),
    ("guards", "Guards"), ("artifacts", "Artifacts"), ("capture", "Capture"), ("traffic", "Traffic"),
    ("verification", "Verification"),
)  # fmt: skip
_COMPARED = (("glance", "At a glance"), ("times", "Times"), ("pieces", "Pieces"), ("factors", "Factors"))
_OUTCOMES = ("compiled", "reused", "loaded", "not met")


def render(view: View) -> str:
    """Return the page of one run."""
    artifacts = [a for program in view.programs for piece in program.pieces for a in piece.artifacts]
    counts = Counter(artifact.outcome for artifact in artifacts)
    outcomes = Counter(verdict.outcome for verdict in view.verdicts)
    return _page(
        "run.html",
        sections=_present(view),
        heading=view.title,
        view=view,
        wall=max(1.0, view.wall_s * 1e9),
        longest=view.longest_piece,
        gaps=[(phase, [str(gap) for gap in view.without_size(phase)]) for phase in ("decode", "prefill")],
        outcomes=", ".join(f"{counts[name]} {name}" for name in _OUTCOMES if counts[name]) or "none",
        total_bytes=sum(artifact.size_bytes for artifact in artifacts),
        faults=outcomes["failed"] + outcomes["drift"],
        held=outcomes["held"],
        untried=outcomes["untried"],
        most_captured=max((one.size_bytes for one in view.captures), default=0) or 1,
    )


def render_comparison(found: Comparison) -> str:
    """Return the page of two runs side by side."""
    return _page("two.html", sections=_COMPARED, heading="two runs", found=found)


def _present(view: View) -> tuple[tuple[str, str], ...]:
    """Leave out of the navigation what the page has not."""
    missing = () if view.programs else ("pieces", "ranges", "guards", "artifacts")
    return tuple(section for section in _SECTIONS if section[0] not in missing)


def _page(template: str, **values: Any) -> str:
    sources = {each.name: each.read_text(encoding="utf-8") for each in _FOLDER.iterdir() if each.is_file()}
    environment = Environment(
        loader=DictLoader(sources), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": time_text,
        "bytes": bytes_text,
        "size": bytes_text,
        "hue": lambda number: round(number * _GOLDEN_ANGLE % 360),
        "short": lambda key: ".".join(part[:12] for part in key.split(".")),
    }
    page = environment.get_template(template)
    return page.render(style=Markup(sources["style.css"]), script=Markup(sources["script.js"]), **values) + "\n"
