"""Whether what a file says of a run can be taken for one: a file may come from anywhere, and be changed by anyone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from math import isfinite
from typing import Any

import piecework.capture_events
import piecework.span_events
from piecework.events import Event

_MOST_MICROSECONDS = 1e13  # of a run: four months
_NOT_IN_ARGUMENTS = ("start_ns", "end_ns", "process", "thread")
_FACTS = {"command": list, "keys": list, "versions": dict, "counters": dict}
_DEFINED_BY = (piecework.capture_events, piecework.span_events)  # imported, so that their types are known


def check_entry(entry: Mapping[str, Any]) -> None:
    """Raise ValueError where an entry of a trace is none that this release writes; unknown events are let be."""
    for name in ("ts", "dur") if entry["ph"] == "X" else ("ts",):
        value = entry[name]
        if not _is_number(value) or not 0 <= value <= _MOST_MICROSECONDS:
            raise ValueError(f"`{name}` of an entry is `{str(value)[:40]}`")
    for name in ("pid", "tid"):
        if type(entry[name]) is not int:
            raise ValueError(f"`{name}` of an entry is `{str(entry[name])[:40]}`")
    own = entry["args"]
    kind = own["event"] if isinstance(own, dict) else None
    if not isinstance(kind, str):
        raise ValueError("an entry does not say which event it is")
    for name, of in _fields_of(kind).items():
        if name not in own or not _fits(own[name], of):
            raise ValueError(f"`{kind}` has `{str(own.get(name, 'nothing'))[:40]}` for `{name}`")


def check_facts(about: Mapping[str, Any]) -> None:
    """Raise ValueError where what is known of a run as a whole is not of the right types."""
    for name in ("wall_ns", "ready_ns"):
        if type(about[name]) is not int or not 0 <= about[name] <= _MOST_MICROSECONDS * 1000:
            raise ValueError(f"`{name}` is `{str(about[name])[:40]}`")
    for name, kind in _FACTS.items():
        if not isinstance(about.get(name, kind()), kind):
            raise ValueError(f"`{name}` is of type `{type(about[name]).__name__}`")
    words = [*about.get("command", ()), *about.get("keys", ())]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("a command and keys are text")
    if not all(isinstance(count, bool) or _is_number(count) for count in _leaves(about.get("counters", {}))):
        raise ValueError("counters are numbers")


@cache
def _fields_of(kind: str) -> Mapping[str, str]:
    found = next((each for each in _kinds(Event) if each.__name__ == kind), Event)
    return {each.name: str(each.type) for each in fields(found) if each.name not in _NOT_IN_ARGUMENTS}


def _kinds(base: type[Event]) -> Iterator[type[Event]]:
    for each in base.__subclasses__():
        yield each
        yield from _kinds(each)


def _fits(value: Any, of: str) -> bool:
    """Tell whether a value is what a field of some annotated type becomes in JSON."""
    if of in ("str", "int", "bool"):
        return type(value).__name__ == of
    if of == "float":  # one that is no number stands as text
        return _is_number(value) or value in ("nan", "inf", "-inf")
    if of == "tuple[str, ...]":
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return of.startswith(("tuple", "Sequence")) == isinstance(value, list | tuple)


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and isfinite(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
