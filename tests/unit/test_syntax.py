"""Python text is read whatever else the process does at the time."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from piecework.values.syntax import parse_python

TEXT = "\n".join(f"v{n} = f(v{n - 1}, [a, b, c], x=(1, 2, {n}))" for n in range(1, 200))


@contextmanager
def parsing_in_between(at: int) -> Iterator[None]:
    """Parse at one collection of garbage, counted from here, as another thread may that is let run there."""
    seen = [0]

    def parse(phase: str, info: dict[str, int]) -> None:
        seen[0] += 1
        if seen[0] == at:
            ast.parse("a = (b, (c, d))")

    thresholds = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(5)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parse)


def failures(read: Callable[[str], ast.AST]) -> int:
    """Count the readings that fail of many, each with a parse at another moment in between; check the others."""
    expected, failed = ast.dump(ast.parse(TEXT)), 0
    for at in range(10, 1_500, 50):
        with parsing_in_between(at):
            try:
                found = read(TEXT)
            except SystemError:
                failed += 1
                continue
        assert ast.dump(found) == expected
    return failed


def test_parsing_inside_parsing_harms_neither() -> None:
    assert failures(parse_python) == 0


@pytest.mark.skipif(sys.version_info >= (3, 11, 8), reason="the interpreter was mended")
def test_an_interpreter_with_the_fault_shows_it() -> None:
    assert failures(ast.parse) > 0


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        parse_python("a +")
    with pytest.raises(SyntaxError):
        parse_python("a = 1", "eval")
