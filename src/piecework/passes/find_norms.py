"""Find norms by the root of the mean square, however a model spells them.

The pattern is anchored at the root: `rsqrt(mean(h * h, -1, keepdim) + epsilon)`, times `h`, with `h` in float32. A
weight is one row of the same width. What rounds where decides whether it is our operator, which rounds to the
weight's dtype before the product, and to the row's dtype after it:

    cast to the row's dtype, then times a weight of that dtype        rms_norm(x, weight)
    times a float32 weight (or `1 + weight` in float32), then cast    rms_norm(x, weight)
    times a narrower weight in float32, then cast                     rms_norm(x, weight.float())
    cast alone                                                        rms_norm(x, None)

Anything else (a cast that is missing, a weight that is wider than the row) is another function and stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from piecework.passes.found import Found
from piecework.passes.reading import (
    Miss,
    called,
    dtype_of,
    either,
    is_cast,
    is_vector_of,
    last_size,
    only_user,
    pair,
    part_of_last,
    spec_of,
    uncast,
)

_PRODUCTS = ("mul",)


def find_rms_norm(node: fx.Node) -> Found | None:
    """Find a norm whose root is this node."""
    root = _root(node)
    if root is None:
        return None
    precise, epsilon, variance_size, inside = root
    scaled = only_user(node)
    if called(scaled) not in _PRODUCTS or not {precise, uncast(precise)} & set(pair(scaled)):
        raise Miss(f"`{node.name}` scales another tensor than the one whose mean square it is of")
    x = precise.args[0] if is_cast(precise) else precise
    width, dtype = last_size(x), dtype_of(x)
    end, weight, products = _tail(scaled, dtype, width)
    through = [node, scaled, *products, *inside]
    if precise is not x and len(set(precise.users) - set(through)) == 0:
        through.append(precise)
    arguments = (x, weight, epsilon, variance_size)
    needs_cast = weight is not None and dtype_of(weight) != "float32" and _weighs_precisely(end, scaled, dtype)
    own = tuple(each for each in dict.fromkeys(through) if each is not end)
    return Found(end, "rms_norm", arguments, own, weight_cast=1 if needs_cast else None)


def _root(node: fx.Node) -> tuple[Any, float, int | None, list[fx.Node]] | None:
    """Read `rsqrt(mean(h * h) + epsilon)`: h, epsilon, the part whose mean is taken, and the nodes in between."""
    if called(node) != "rsqrt" or spec_of(node) is None:
        return None
    total: Any = node.args[0]
    if called(total) != "add":
        return None
    operands = either(total, lambda each: called(each) == "mean")
    if operands is None or not isinstance(operands[1], float | int):
        return None
    mean, epsilon = operands
    square = _mean_of_last(mean)
    part = _squared(square)
    if part is None:
        return None
    precise, variance_size = part, None
    inside = [total, mean, square]
    taken = part_of_last(part)
    if taken is not None and taken[1] == 0 and is_part_read_alone(part, square):
        precise, variance_size = taken[0], taken[2]
        inside.append(part)
    if dtype_of(precise) != "float32":
        raise Miss(f"the mean square is taken in `{dtype_of(precise)}`")
    return precise, float(epsilon), variance_size, inside


def is_part_read_alone(part: fx.Node, square: fx.Node) -> bool:
    """Tell whether a part of a row is read for its mean square and for nothing else."""
    return set(part.users) == {square}


def _mean_of_last(mean: Any) -> Any:
    """Return what the mean over the last dimension is taken of."""
    dims = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    keeps = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim")
    spec = spec_of(mean.args[0])
    last = (-1, len(spec.shape) - 1) if spec is not None else ()
    dim = dims[0] if isinstance(dims, tuple | list) and len(dims) == 1 else dims
    if dim not in last or keeps is not True or mean.kwargs.get("dtype") is not None:
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


def _tail(scaled: fx.Node, dtype: str, width: Any) -> tuple[fx.Node, Any, list[fx.Node]]:
    """Follow the scaled row to where it is cast and weighed: the last node, the weight, and what lies between."""
    through: list[fx.Node] = []
    end = scaled
    weight: Any = None
    while True:
        step = _next(end, through, width, weight is not None)
        if step is None:
            break
        if not is_cast(step):
            first, second = pair(step)
            weight = second if first is end else first
        through.append(end)
        end = step
    if dtype_of(end) != dtype:
        raise Miss(f"`{end.name}` gives `{dtype_of(end)}` where the row is `{dtype}`")
    rounds_first = weight is not None and dtype != "float32" and not _weighs_precisely(end, scaled, dtype)
    if rounds_first and dtype_of(weight) != dtype:
        raise Miss(f"the weight is `{dtype_of(weight)}` where the rounded row is `{dtype}`")
    if weight is not None and not rounds_first and dtype_of(weight) not in ("float32", dtype):
        raise Miss(f"the weight is `{dtype_of(weight)}` where the row is `{dtype}`")
    return end, weight, through


def _next(end: fx.Node, through: list[fx.Node], width: Any, is_weighed: bool) -> fx.Node | None:
    """Return the cast or the product with a weight that follows, if it belongs to the norm."""
    if len(end.users) != 1:
        return None
    user = next(iter(end.users))
    if is_cast(user) and user.args[0] is end:
        return user if not any(is_cast(each) and _rounds(each) for each in (*through, end)) else None
    if is_weighed or called(user) not in _PRODUCTS or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is end else user.args[0]
    return user if is_vector_of(other, width) else None


def _rounds(cast: fx.Node) -> bool:
    return dtype_of(cast) != dtype_of(cast.args[0])


def _weighs_precisely(end: fx.Node, scaled: fx.Node, dtype: str) -> bool:
    """Tell whether the weight multiplies the float32 row: what is cast to the row's dtype is then their product."""
    node = end
    while node is not scaled:
        if not is_cast(node):
            first, second = pair(node)
            row = first if scaled in _chain(first) or first is scaled else second
            return dtype_of(row) == "float32"
        node = node.args[0]  # type: ignore[assignment]
    return False


def _chain(node: Any) -> list[Any]:
    found = []
    while is_cast(node):
        node = node.args[0]
        found.append(node)
    return found
