"""What all options have in common: a name that is none is told with the nearest one, and a value must make sense."""

from __future__ import annotations

import difflib
import functools
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from piecework.errors import OptionError

Kind = TypeVar("Kind", bound=type)
_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")
_SHORT_LIST = 8  # of names that a hint tells all of


def by_name(kind: Kind) -> Kind:
    """Make a dataclass of options tell of a name that it does not have as it tells of a value: an OptionError."""
    make: Any = vars(kind)["__init__"]
    known = tuple(each.name for each in fields(kind))

    @functools.wraps(make)
    def make_by_name(self: Any, *values: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise OptionError(f"option `{name}` is unknown", hint=near(name, known), facts={"name": name})
        if len(values) > len(known):
            raise OptionError(f"{len(values)} values are given for {len(known)} options", hint="give options by name")
        make(self, *values, **given)

    setattr(kind, "__init__", make_by_name)  # noqa: B010  mypy takes an assignment for a mistake
    return kind


def near(name: str, known: Sequence[str]) -> str:
    """Return the hint for a name that is none of those known: the nearest one, and all where they are few."""
    close = difflib.get_close_matches(name, known, n=1)
    every = f"known are {', '.join(known)}"
    if not close:
        return every
    return f"did you mean `{close[0]}`?" + (f" {every}" if len(known) <= _SHORT_LIST else "")


def whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse what is no whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        wanted = f"from {low} up" if high is None else f"from {low} to {high}"
        raise OptionError(f"`{name}` is `{value!r}`", hint=f"give a whole number {wanted}", facts={"name": name})


def number(name: str, value: Any, low: float, high: float) -> None:
    """Refuse what is no number within bounds; NaN lies within none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        hint = f"give a number from {low:g} to {high:g}"
        raise OptionError(f"`{name}` is `{value!r}`", hint=hint, facts={"name": name})


def seconds(name: str, value: Any, hint: str, *, above: float = -1.0) -> None:
    """Refuse what is no time of zero seconds or more, or of more than `above`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or value <= above:
        raise OptionError(f"`{name}` is `{value!r}`", hint=hint, facts={"name": name})


def truth(name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise OptionError(f"`{name}` is `{value!r}`", hint="give true or false", facts={"name": name})


def one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuse a word that is none of those known."""
    if value not in known:
        raise OptionError(f"`{name}` is `{value}`", hint=near(str(value), known), facts={"name": name})


def text(name: str, value: Any, what: str) -> str:
    """Return text, or the text of a path; refuse what is none."""
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str) or "\0" in found:
        raise OptionError(f"`{name}` is `{value!r}`", hint=f"give {what} as text", facts={"name": name})
    return found


def texts(name: str, value: Any, example: str) -> tuple[str, ...]:
    """Return a tuple of texts that are not empty."""
    found = many(value)
    if found is None or not all(isinstance(each, str) and each for each in found):
        hint = f'give a list of names such as "{example}"'
        raise OptionError(f"`{name}` is `{value!r}`", hint=hint, facts={"name": name})
    return found


def operators(name: str, value: Any) -> tuple[str, ...]:
    """Return qualified names of operators."""
    found = texts(name, value, "my::attention")
    for each in found:
        if not _OPERATOR.fullmatch(each):
            space, dot, rest = each.partition(".")
            meant = f"`{space}::{rest}`" if dot and space and rest and "::" not in each else "`namespace::name`"
            raise OptionError(
                f"`{name}` holds `{each}`, which names no operator", hint=f"write it as {meant}", facts={"name": name}
            )
    return found


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return sizes, each a whole number from 1 up, in order and once."""
    found = many(value)
    if found is None or not all(type(each) is int for each in found):
        hint = "give a list of whole numbers from 1 up"
        raise OptionError(f"`{name}` is `{value!r}`", hint=hint, facts={"name": name})
    if any(each < 1 for each in found):
        raise OptionError(f"`{name}` is `{found}`", hint="give whole numbers from 1 up", facts={"name": name})
    return tuple(sorted(set(found)))


def ranges(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Return ranges of sizes in order; they must stand side by side."""
    try:
        found = sorted((_size(low), _size(high)) for low, high in value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} `{value!r}` are not pairs", hint="write them as ((1, 64), (65, 8192))") from error
    if not found:
        raise OptionError(f"`{name}` is empty", hint="give at least one pair, as in ((1, 8192),)")
    for low, high in found:
        if not 1 <= low <= high:
            raise OptionError(
                f"range `({low}, {high})` is not an interval of sizes",
                hint="give two whole numbers with 1 <= low <= high",
            )
    for (_, edge), (low, _) in zip(found, found[1:], strict=False):
        if low != edge + 1:
            shown = ", ".join(f"{one}-{two}" for one, two in found)
            raise OptionError(
                f"{name} leave a gap or overlap at `{edge + 1 if low > edge else low}`: `{shown}`",
                hint="write them side by side, as 1 to 64 and 65 to 8192",
            )
    return tuple(found)


def _size(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a truth value is no size")
    return operator.index(value)


def many(value: Any) -> tuple[Any, ...] | None:
    """Return the items of what holds several; nothing for one text, or a mapping, or what holds none."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else None
