"""docs/errors.md, the tree drawn in the module and the classes say the same."""

from __future__ import annotations

import re

from house.source_tree import ROOT
from piecework import errors

HEADING = re.compile(r"^#+ `?(\w+)`?$", re.MULTILINE)
DRAWN = re.compile(r"^(?P<bars>[│ ]*)(?:[├└]── )(?P<name>\w+)\s+\S.*?exit (?P<code>\d)$", re.MULTILINE)


def error_classes() -> dict[str, type[errors.PieceworkError]]:
    """List the classes of the tree by name."""
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PieceworkError)
    }


def sections() -> dict[str, str]:
    """Split docs/errors.md into the text under each heading."""
    text = (ROOT / "docs/errors.md").read_text()
    found = list(HEADING.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    return {match[1]: text[match.end() : end] for match, end in zip(found, ends, strict=True)}


def test_every_error_has_a_heading() -> None:
    titles = set(sections()) - {"Errors"}
    assert titles == set(error_classes())


def test_every_section_gives_the_exit_code_and_a_remedy() -> None:
    wrong = {}
    for name, error in error_classes().items():
        section = sections()[name]
        if not re.search(rf"\bExit code {error.exit_code}\b", section):
            wrong[name] = f"does not say `Exit code {error.exit_code}`"
        elif name != "PieceworkError" and "What to do:" not in section:
            wrong[name] = "does not say what to do"
    assert wrong == {}


def test_the_drawn_tree_is_the_tree() -> None:
    """Parents come from the indentation of the drawing, four columns a level."""
    parents = ["PieceworkError"]
    drawn = {}
    for match in DRAWN.finditer(errors.__doc__ or ""):
        depth = (len(match["bars"]) - 4) // 4 + 1
        drawn[match["name"]] = (parents[depth - 1], int(match["code"]))
        parents[depth:] = [match["name"]]
    real = {
        name: (error.__bases__[0].__name__, error.exit_code)
        for name, error in error_classes().items()
        if name != "PieceworkError"
    }
    assert drawn == real


def test_an_error_shows_its_hint_and_keeps_its_facts() -> None:
    error = errors.ShapeOutOfRange("`17` tokens", hint="raise `max_num_batched_tokens`", facts={"size": 17})
    assert str(error) == "`17` tokens\nhint: raise `max_num_batched_tokens`"
    assert error.facts == {"size": 17}
    assert isinstance(error, errors.InputError)
