"""Find rotary positions, in the spellings that models use.

    x * cos + cat(-x[half:], x[:half]) * sin                           whole-width cosines, pairs of halves
    x * cos + stack(-x[1::2], x[::2]).flatten() * sin                  whole-width cosines, pairs of neighbours
    cat(first * cos - second * sin, second * cos + first * sin)        half-width cosines

A part of a row that is turned, and joined with the rest, is one call too. Each product is private to its pattern.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from piecework.passes.found import Found, nodes_between
from piecework.passes.reading import argument, called, last_size, pair, part_of_last, slice_of_last, spec_of


def find_rotary(node: fx.Node) -> Found | None:
    """Find a turned tensor that this node gives, or what it is a part of."""
    turned = _turned_whole(node) or _turned_halves(node)
    if turned is None:
        return None
    x, cos, sin, interleaved = turned
    width = last_size(x)
    if not isinstance(width, int) or width % 2 or spec_of(node) is None or spec_of(node).shape != spec_of(x).shape:  # type: ignore[union-attr]
        return None
    end, source, rotary_dim = _with_rest(node, x, width)
    inside = tuple(each for each in nodes_between(end, [source, cos, sin]) if each is not end)
    return Found(end, "rotary", (source, cos, sin, rotary_dim, interleaved), inside)


def _turned_whole(node: fx.Node) -> tuple[Any, Any, Any, bool] | None:
    """Read `x * cos + rotated(x) * sin`."""
    if called(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    for plain, rotated in (node.args, node.args[::-1]):
        if called(plain) != "mul" or called(rotated) != "mul":
            continue
        for partner, sin in _orders(rotated):
            found = _rotated(partner)
            if found is None:
                continue
            x, interleaved = found
            cos = next((other for own, other in _orders(plain) if own is x), None)
            if cos is not None and last_size(cos) == last_size(sin) == last_size(x):
                return x, cos, sin, interleaved
    return None


def _orders(product: Any) -> tuple[tuple[Any, Any], ...]:
    first, second = pair(product)
    return ((first, second), (second, first)) if isinstance(first, fx.Node) and isinstance(second, fx.Node) else ()


def _rotated(node: Any) -> tuple[fx.Node, bool] | None:
    """Read `cat(-x[half:], x[:half])` or its form for neighbours: the tensor, and whether pairs are neighbours."""
    if called(node) == "flatten" and argument(node, 1, "start_dim", 0) == -2 and called(node.args[0]) == "stack":
        return _rotated_neighbours(node.args[0])
    if called(node) not in ("cat", "concat") or argument(node, 1, "dim", 0) not in _last(node):
        return None
    parts = node.args[0]
    if len(parts) != 2 or called(parts[0]) != "neg":
        return None
    second, first = part_of_last(parts[0].args[0]), part_of_last(parts[1])
    if first is None or second is None or first[0] is not second[0]:
        return None
    width = last_size(first[0])
    if not isinstance(width, int) or (first[1:], second[1:]) != ((0, width // 2), (width // 2, width)):
        return None
    return first[0], False


def _rotated_neighbours(stacked: Any) -> tuple[fx.Node, bool] | None:
    parts = stacked.args[0]
    spec = spec_of(stacked)
    last = (-1, len(spec.shape) - 1) if spec is not None else ()
    if len(parts) != 2 or called(parts[0]) != "neg" or argument(stacked, 1, "dim", 0) not in last:
        return None
    second, first = slice_of_last(parts[0].args[0]), slice_of_last(parts[1])
    if first is None or second is None or first[0] is not second[0]:
        return None
    starts = (first[1] or 0, second[1], first[2], second[2], first[3], second[3])
    return (first[0], True) if starts == (0, 1, None, None, 2, 2) else None


def _last(node: fx.Node) -> tuple[int, ...]:
    spec = spec_of(node)
    return (-1, len(spec.shape) - 1) if spec is not None else ()


def _turned_halves(node: Any) -> tuple[Any, Any, Any, bool] | None:
    """Read `cat(first * cos - second * sin, second * cos + first * sin)`."""
    if called(node) not in ("cat", "concat") or argument(node, 1, "dim", 0) not in _last(node):
        return None
    parts = node.args[0]
    if len(parts) != 2 or called(parts[0]) != "sub" or called(parts[1]) != "add":
        return None
    products = [*parts[0].args, *parts[1].args]
    if len(products) != 4 or any(called(each) != "mul" for each in products) or parts[0].kwargs or parts[1].kwargs:
        return None
    for first, cos in _orders(products[0]):
        for second, sin in _orders(products[1]):
            others = {frozenset(pair(products[2])), frozenset(pair(products[3]))}
            if others == {frozenset((second, cos)), frozenset((first, sin))}:
                return _of_halves(first, second, cos, sin)
    return None


def _of_halves(first: Any, second: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any, bool] | None:
    one, other = part_of_last(first), part_of_last(second)
    if one is None or other is None or one[0] is not other[0]:
        return None
    width = last_size(one[0])
    if not isinstance(width, int) or (one[1:], other[1:]) != ((0, width // 2), (width // 2, width)):
        return None
    return (one[0], cos, sin, False) if last_size(cos) == last_size(sin) == width // 2 else None


def _with_rest(node: fx.Node, x: Any, width: int) -> tuple[fx.Node, Any, int]:
    """Take in the rest of a row of which only the first part is turned: the last node, the whole row, the part."""
    part = part_of_last(x)
    user: Any = next(iter(node.users)) if len(node.users) == 1 else None
    if part is None or part[1] != 0 or user is None or called(user) not in ("cat", "concat"):
        return node, x, width
    joined = user.args[0]
    rest = part_of_last(joined[1]) if isinstance(joined, list | tuple) and len(joined) == 2 else None
    if joined[0] is not node or argument(user, 1, "dim", 0) not in _last(user) or rest is None:
        return node, x, width
    return (user, part[0], width) if rest == (part[0], width, last_size(part[0])) else (node, x, width)
