"""Declare a pass: its name, version and place, and a digest of what it does.

The passes of this package change their version by hand. A user's own also carries a digest of its code, so that an
edited pass misses every record that it made before.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from piecework.errors import OptionError
from piecework.values.digest import digest_code, digest_data
from piecework.values.rewriting import GRAPH, PLACES, GraphPass, Rewritten

_OWN_PACKAGE = __name__.partition(".")[0]


def graph_pass(
    name: str, *, version: int = 1, runs_on: str = GRAPH, expects_match: bool = False
) -> Callable[[Callable[[Any], Rewritten]], GraphPass]:
    """Declare a function graph -> graph a pass, for `CompileOptions(passes=(…,))`.

    On the `graph` it is handed the `TracedGraph` of the whole model before the split; on a `piece` a `FunctionalPiece`,
    inside the compiler, where it may not change the shape or dtype of a value that crosses a cut. It edits the graph it
    is handed or makes another, and returns `Rewritten(graph, matches, misses)`. What it does to nodes it need not write
    into their metadata: that is computed afterwards, and checked. With `expects_match` it says so where it matches
    nothing.
    """
    if not name.isidentifier():
        raise OptionError(f"a pass cannot be named `{name}`", hint="use one word, such as `merge_gates`")
    if runs_on not in PLACES:
        raise OptionError(f"a pass cannot run on `{runs_on}`", hint=f"use one of {', '.join(PLACES)}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise OptionError(f"version `{version!r}` of pass `{name}` is no version", hint="use 1, 2, 3, …")

    def declare(function: Callable[[Any], Rewritten]) -> GraphPass:
        is_ours = function.__module__.partition(".")[0] == _OWN_PACKAGE
        return GraphPass(name, version, runs_on, function, expects_match, "" if is_ours else digest_of_code(function))

    return declare


def digest_of_code(function: Callable[..., Any]) -> str:
    """Return a digest of a function and of the functions, classes and plain values of its package that it names.

    What it reaches by way of a module (`module.function`) is not followed; the docs say so.
    """
    seen: set[int] = set()
    found = list(_parts(function, _package_of(function), seen))
    return digest_data(found)[:16]


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _parts(value: Any, package: str, seen: set[int]) -> Iterator[list[str]]:
    """Yield what tells one version of a function or class from another, and of what it names."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type):
        for name, member in sorted(vars(value).items()):
            inner = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(inner, types.FunctionType):
                yield [name, *(part for parts in _parts(inner, package, seen) for part in parts)]
        return
    function = getattr(value, "__wrapped__", value)
    if not isinstance(function, types.FunctionType):
        return
    defaults = repr((function.__defaults__, function.__kwdefaults__))
    yield [digest_code(function.__code__), "" if " at 0x" in defaults else defaults]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    named = {name: function.__globals__.get(name) for name in _names(function.__code__)}
    for name, inner in [*sorted(named.items()), *((name, _content(cell)) for name, cell in cells)]:
        if isinstance(inner, type | types.FunctionType):
            if _package_of(inner) == package:
                yield from _parts(inner, package, seen)
        elif isinstance(inner, str | bytes | int | float | tuple | list | dict | set | frozenset):
            text = repr(sorted(map(repr, inner))) if isinstance(inner, set | frozenset) else repr(inner)
            yield [name, "" if " at 0x" in text else text]


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function and those inside it speak of."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names, *(name for one in inner for name in _names(one))}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
