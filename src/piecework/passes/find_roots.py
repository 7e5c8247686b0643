"""Read the root of a row's mean square, however a model spells it.

    rsqrt(m + epsilon), (m + epsilon) ** -0.5, 1 / sqrt(m + epsilon)    what a row is multiplied by
    sqrt(m + epsilon)                                                  what a row is divided by

where `m` is `mean(h * h, -1)` or `sum(h * h, -1) / width`. The mean keeps its dimension, or is given it again anywhere
behind it (`unsqueeze(-1)`, `[..., None]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from piecework.passes.reading import (
    Miss,
    argument,
    called,
    dtype_of,
    either,
    last_size,
    only_user,
    pair,
    part_of_last,
    spec_of,
)

DIVISIONS = ("truediv", "div", "divide")


@dataclass(frozen=True)
class Root:
    """The root of the mean square of `row`; `end` gives it, by which the row is divided or multiplied."""

    row: Any
    epsilon: float
    variance_size: int | None
    inside: tuple[fx.Node, ...]
    end: fx.Node
    divides: bool


def root_of(node: fx.Node) -> Root | None:
    """Read the root that this node takes; raise Miss where it is nearly one of a row's mean square."""
    divides = _takes_root(node)
    if divides is None or spec_of(node) is None:
        return None
    inside = [node]
    total = _with_dimension(node.args[0], inside)
    if called(total) != "add":
        return None
    operands = either(total, lambda each: called(_unsqueezed(each)) in ("mean", *DIVISIONS))
    if operands is None or not isinstance(operands[1], float | int) or isinstance(operands[1], bool):
        return None
    inside.append(total)
    square = _mean_of_last(_with_dimension(operands[0], inside), inside)
    part = _squared(square)
    if part is None:
        return None
    inside.append(square)
    row, variance_size = _whole_row(part, square, inside)
    if dtype_of(row) != "float32":
        raise Miss(f"the mean square is taken in `{dtype_of(row)}`")
    end, divides = _end(node, divides, inside)
    kept, given = spec_of(end), spec_of(row)
    if kept is None or given is None or kept.shape != (*given.shape[:-1], 1):
        raise Miss(f"`{end.name}` is of no mean over the last dimension that keeps it")
    return Root(row, float(operands[1]), variance_size, tuple(inside), end, divides)


def _takes_root(node: fx.Node) -> bool | None:
    """Tell whether a node takes a root to divide by, or its inverse; None for any other node."""
    name = called(node)
    power = node.args[1] if name == "pow" and len(node.args) == 2 else None
    if name == "rsqrt" or power == -0.5:
        return False
    return True if name == "sqrt" or power == 0.5 else None


def _whole_row(part: Any, square: fx.Node, inside: list[fx.Node]) -> tuple[Any, int | None]:
    """Return the row whose first elements a mean is taken of, and how many; all where the mean is of the row."""
    taken = part_of_last(part)
    if taken is None or taken[1] != 0 or set(part.users) != {square}:
        return part, None
    inside.append(part)
    return taken[0], taken[2]


def _end(node: fx.Node, divides: bool, inside: list[fx.Node]) -> tuple[fx.Node, bool]:
    """Follow a root to the node by which the row is scaled, past its inverse and the dimension that it is given."""
    while len(node.users) == 1:
        user = only_user(node)
        is_inverse = divides and (
            called(user) == "reciprocal"
            or (called(user) in DIVISIONS and user.args[0] in (1, 1.0) and user.args[1:] == (node,) and not user.kwargs)
        )
        if not is_inverse and _unsqueezed(user) is user:
            break
        divides, node = divides and not is_inverse, user
        inside.append(user)
    return node, divides


def _with_dimension(node: Any, inside: list[fx.Node]) -> Any:
    """Step back over the call that gives a mean its last dimension again."""
    source = _unsqueezed(node)
    if source is not node:
        inside.append(node)
    return source


def _unsqueezed(node: Any) -> Any:
    """Return what a node gives a last dimension of 1, or the node itself."""
    given = spec_of(node.args[0]) if isinstance(node, fx.Node) and node.args else None
    if given is None:
        return node
    rank = len(given.shape)
    if called(node) == "unsqueeze" and argument(node, 1, "dim") in (-1, rank):
        return node.args[0]
    if called(node) != "getitem" or not isinstance(node.args[1], tuple) or node.args[1][-1:] != (None,):
        return node
    before = node.args[1][:-1]
    is_whole = before == (Ellipsis,) or before == (slice(None),) * rank
    return node.args[0] if is_whole else node


def _mean_of_last(mean: Any, inside: list[fx.Node]) -> Any:
    """Return what the mean over the last dimension is taken of."""
    inside.append(mean)
    name = called(mean)
    if name in DIVISIONS:
        total, width = pair(mean)
        total = _with_dimension(total, inside)
        if called(total) != "sum" or isinstance(width, fx.Node) or width != last_size(total.args[0]):
            raise Miss(f"`{mean.name}` is no mean over the last dimension")
        mean = total
        inside.append(total)
    dims, dtype = argument(mean, 1, "dim"), argument(mean, 3, "dtype")
    spec = spec_of(mean.args[0])
    last = (-1, len(spec.shape) - 1) if spec is not None else ()
    dim = dims[0] if isinstance(dims, tuple | list) and len(dims) == 1 else dims
    if dim not in last or dtype is not None:
        raise Miss(f"`{mean.name}` is no mean over the last dimension that keeps it")
    return mean.args[0]


def _squared(square: Any) -> Any:
    """Return what is squared, or None."""
    name = called(square)
    if name == "pow" and square.args[1:] in ((2,), (2.0,)):
        return square.args[0]
    if name == "square" or (name == "mul" and len(square.args) == 2 and square.args[0] is square.args[1]):
        return square.args[0]
    return None
