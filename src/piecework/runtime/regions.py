"""A bound program region by region: what capture walks through, and what replay calls between graphs.

The program itself runs as one flat function. Here the same regions stand as callables of their own, made of the same
lines over the same names, so that a capture can close a graph before each opaque call and open the next one after it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.runtime.explain import Checked, Leaf
from piecework.values.graph import OPAQUE, PIECE
from piecework.values.shapes import Range
from piecework.values.syntax import parse_python


@dataclass(frozen=True)
class RegionText:
    """One region as lines of the program's code; `operators` are those that its opaque calls make.

    A part of a compiled piece is a `source` instead, a function `region` of `arguments` over the globals of the piece
    that `host` names.
    """

    kind: str
    name: str
    lines: tuple[str, ...]
    results: tuple[str, ...]
    operators: tuple[str, ...] = ()
    source: str = ""
    host: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outline:
    """A program's code, region by region: `parameters` are what it is called with, `result` an expression.

    `inside` are opaque operators that pieces call.
    """

    parameters: tuple[str, ...]
    regions: tuple[RegionText, ...]
    result: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bound:
    """What a bound program is made of: the check of its arguments, one run a choice of ranges, and its outline."""

    leaves: Sequence[Leaf]
    checked: Checked
    runs: tuple[Callable[..., Any], ...]
    boxes: tuple[Mapping[str, Range], ...]
    outline: Callable[[int], Outline]


@dataclass(frozen=True)
class BoundRegion:
    """A region as a callable of `arguments`, by name in order; it returns a tuple of `results`."""

    kind: str
    name: str
    call: Callable[..., tuple[Any, ...]]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    operators: tuple[str, ...] = ()

    @property
    def is_opaque(self) -> bool:
        return self.kind == OPAQUE


@dataclass(frozen=True)
class BoundResult:
    """The program's result as a callable of the values that it is made of."""

    call: Callable[..., Any]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class BoundRun:
    """One run of a program: `call` is the whole of it, `regions` and `result` are the same in parts."""

    call: Callable[..., Any]
    parameters: tuple[str, ...]
    regions: tuple[BoundRegion, ...]
    result: BoundResult

    @property
    def last_uses(self) -> Mapping[str, int]:
        """Return for each value the last region that takes it; those of the result stay."""
        last: dict[str, int] = {}
        for index, region in enumerate(self.regions):
            last |= dict.fromkeys((*region.results, *region.arguments), index)
        return {name: index for name, index in last.items() if name not in self.result.arguments}


def watched_run(run: Callable[..., Any], outline: Outline) -> BoundRun:
    """Cut the run that watches its bodies, as for the first call of a size, into its regions."""
    run = getattr(run, "general", run)
    first = run.__globals__.get("_first")
    return bound_run(run if first is None else first.run(), outline)


def bound_run(run: Callable[..., Any], outline: Outline) -> BoundRun:
    """Cut one run of a program into its regions; pieces, bodies and weights are those of the run itself.

    A run that keeps memory for small sizes is taken in its general form: a graph has memory of its own.
    """
    run = getattr(run, "general", run)
    space: dict[str, Any] = dict(run.__globals__)
    known = dict.fromkeys(outline.parameters)
    regions: list[BoundRegion] = []
    for text in outline.regions:
        if text.source:
            own = dict(space[text.host].__globals__)
            exec(compile(text.source, f"<piecework {text.name}>", "exec"), own)
            regions.append(
                BoundRegion(text.kind, text.name, own["region"], text.arguments, text.results, text.operators)
            )
            known |= dict.fromkeys(text.results)
            continue
        arguments = tuple(name for name in _names_read(text.lines) if name in known and name not in text.results)
        returned = f"return ({', '.join(text.results)}{',' if len(text.results) == 1 else ''})"
        call = (
            space[text.name] if text.kind == PIECE else _function(text.name, arguments, [*text.lines, returned], space)
        )
        regions.append(BoundRegion(text.kind, text.name, call, arguments, text.results, text.operators))
        known |= dict.fromkeys(text.results)
    used = tuple(name for name in _names_read([outline.result]) if name in known)
    result = BoundResult(_function("result", used, [f"return {outline.result}"], space), used)
    return BoundRun(run, outline.parameters, tuple(regions), result)


def _names_read(lines: Sequence[str]) -> list[str]:
    """Return the names that lines refer to, each once, in order of their first use."""
    found = [node for line in lines for node in ast.walk(parse_python(line)) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(node.id for node in found if isinstance(node.ctx, ast.Load)))


def _function(
    name: str, arguments: Sequence[str], lines: Sequence[str], space: Mapping[str, Any]
) -> Callable[..., Any]:
    source = f"def function({', '.join(arguments)}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"
    own = dict(space)
    exec(compile(source, f"<piecework {name}>", "exec"), own)
    return own["function"]  # type: ignore[no-any-return]
