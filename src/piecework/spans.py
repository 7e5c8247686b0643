"""Spans: what lies inside what, in any thread.

A span is something that takes time, with a number. What is observed while it is open names it as its parent. It is open
in the thread that opened it, and in others where the work that they are given was made with `carry`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")
Watch = Callable[[Any], None]

_numbers = itertools.count(1)
# The span that is open around, 0 where there is none, who observes it, and what it is about.
_around: ContextVar[tuple[int, Watch | None, str]] = ContextVar("piecework_span", default=(0, None, ""))


def open_span() -> int:
    """Return the number of the span that is open around; 0 where there is none."""
    return _around.get()[0]


def span_observer() -> Watch | None:
    """Return who observes the span that is open around; None where there is none."""
    return _around.get()[1]


def span_subject() -> str:
    """Return what the span that is open around is about, such as a piece and its range; empty where nobody said."""
    return _around.get()[2]


@contextmanager
def spanning(observer: Watch | None, subject: str = "") -> Iterator[int]:
    """Open a span and give its number; events of the block, and of what it calls, name it as their parent.

    `subject` names what it is about, for what is called without being told; without one it is that of the span around.
    """
    number = next(_numbers)
    token = _around.set((number, observer, subject or span_subject()))
    try:
        yield number
    finally:
        _around.reset(token)


@contextmanager
def observed_by(observer: Watch | None) -> Iterator[None]:
    """Let what the block calls be observed, in no span: for a thread that outlives the one that began it."""
    token = _around.set((0, observer, ""))
    try:
        yield
    finally:
        _around.reset(token)


def carry(work: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return `work` bound to the span that is open here: in whichever thread it runs, its events belong to it."""
    around = _around.get()

    def carried(*args: Given.args, **keywords: Given.kwargs) -> Result:
        token = _around.set(around)
        try:
            return work(*args, **keywords)
        finally:
            _around.reset(token)

    return carried
