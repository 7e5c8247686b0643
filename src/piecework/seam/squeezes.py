"""Dimensions that a model squeezes away where their size is 1: torch traces as if none were, and asks nothing."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence

import sympy
import torch
from torch import fx

from piecework.seam.kinds import operator_name
from piecework.seam.lines import line_of
from piecework.seam.symbols import SymbolTable
from piecework.values.graph import ShapeGuard

_SQUEEZES = ("squeeze", "squeeze_", "squeeze_copy")


def squeeze_guards(nodes: Sequence[fx.Node], table: SymbolTable) -> tuple[ShapeGuard, ...]:
    """Return for each dimension of varying size that is squeezed the condition that it is not 1, with the line.

    At 1 the result has a dimension less, and whatever the model decided by its rank is another decision.
    """
    found = []
    for node in nodes:
        for size in _squeezed(node):
            condition = sympy.Ne(table.expression(size), 1)
            if condition != sympy.true:
                found.append(ShapeGuard(str(table.text(condition)), _place(node)))
    return tuple(dict.fromkeys(found))


def _squeezed(node: fx.Node) -> Iterator[torch.SymInt]:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    name = operator_name(node).partition("::")[2].partition(".")[0] or name
    given = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    value = given.meta.get("example_value") if isinstance(given, fx.Node) else None
    if name not in _SQUEEZES or not isinstance(value, torch.Tensor):
        return
    dims = node.args[1:] if len(node.args) > 1 else node.kwargs.get("dim", range(value.dim()))
    for dim in dims if isinstance(dims, Sequence) else (dims,):
        for one in dim if isinstance(dim, Sequence) else (dim,):
            if isinstance(one, int) and isinstance(size := value.shape[one], torch.SymInt):
                yield size


def _place(node: fx.Node) -> str:
    file, line = line_of(node)
    return f"{file}:{line} ({linecache.getline(file, line).strip()})" if file else ""
