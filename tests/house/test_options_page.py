"""The tables of docs/options.md are made from the options themselves; `--refresh-golden` rewrites them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from house.source_tree import ROOT
from piecework import capture_options, options

PAGE = ROOT / "docs/options.md"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Write a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def fields_table(model: type = options.CompileOptions) -> str:
    """List every option: its default, whether it is keyed, what it says."""
    rows = [
        [f"`{field.name}`", f"`{field.default!r}`", "yes" if field.metadata["keyed"] else "no", field.metadata["text"]]
        for field in dataclasses.fields(model)
    ]
    return table(["option", "default", "keyed", "what it says"], rows)


def capture_table() -> str:
    """List the options of capture."""
    return fields_table(capture_options.CaptureOptions)


def levels_table() -> str:
    """List what each level gives as default."""
    names = list(options.LEVELS[0])
    rows = [[f"`-O{level}`", *(str(values[name]) for name in names)] for level, values in options.LEVELS.items()]
    return table(["level", *names], rows)


@pytest.mark.parametrize(
    ("mark", "make"), [("fields", fields_table), ("levels", levels_table), ("capture", capture_table)]
)
def test_the_page_holds_the_tables(mark: str, make: Callable[[], str], request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text()
    between = re.compile(rf"(?<=<!-- {mark} -->\n).*?(?=<!-- end of {mark} -->)", re.DOTALL)
    found = between.search(text)
    assert found is not None, f"docs/options.md has no place for its table of {mark}"
    expected = make() + "\n"
    if request.config.getoption("--refresh-golden"):
        PAGE.write_text(text[: found.start()] + expected + text[found.end() :])
        return
    assert found[0] == expected, "docs/options.md is behind the options; use --refresh-golden and review"


def test_every_mode_is_explained_under_its_number() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\d) \|", PAGE.read_text(), re.MULTILINE)
    assert listed == [(mode, str(number)) for number, mode in enumerate(options.MODES)]


def test_what_the_caller_sets_wins_over_the_level() -> None:
    given = options.CompileOptions(mode="trace_once", optimization_level=0).resolve()
    assert (given.mode, given.compiler) == ("trace_once", options.LEVELS[0]["compiler"])
    for level, values in options.LEVELS.items():
        resolved = options.CompileOptions(optimization_level=level).resolve()
        found = {name: getattr(resolved, "capture_rule" if name == "capture" else name) for name in values}
        assert found == values, f"-O{level} does not fill in all of its table"
