"""Find norms by the root of the mean square, however a model spells them.

The pattern is anchored at the root (`find_roots`), which scales the very row whose mean square it is of, in float32; or
it is torch's own `rms_norm`. A weight is one row of the same width. What rounds where decides whether it is our
operator, which rounds to the weight's dtype before the product, and to the row's dtype after it:

    cast to the row's dtype, then times a weight of that dtype        rms_norm(x, weight)
    times a float32 weight (or `1 + weight` in float32), then cast    rms_norm(x, weight)
    times a narrower weight in float32, then cast                     rms_norm(x, weight.float())
    cast alone                                                        rms_norm(x, None)
    torch's own, which weighs in float32 and rounds once              rms_norm(x, weight.float())

Anything else (a cast that is missing, a weight that is wider than the row) is another function and stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from piecework.passes.find_roots import DIVISIONS, Root, root_of
from piecework.passes.found import Found
from piecework.passes.reading import (
    Miss,
    argument,
    called,
    dtype_of,
    form_of,
    is_cast,
    is_vector_of,
    last_size,
    only_user,
    pair,
    spec_of,
    uncast,
)
from piecework.values.signature import TensorSpec

_PRODUCTS = ("mul",)


def find_rms_norm(node: fx.Node) -> Found | None:
    """Find a norm whose root is this node, or that this node is."""
    if called(node) == "rms_norm" and not form_of(node):
        return _whole(node)
    root = root_of(node)
    if root is None:
        return None
    precise, scaled = root.row, only_user(root.end)
    _require_scaled(scaled, root)
    x = precise.args[0] if is_cast(precise) else precise
    width, dtype = last_size(x), dtype_of(x)
    end, weight, products = _tail(scaled, dtype, width)
    through = [scaled, *products, *root.inside]
    if precise is not x and set(precise.users) <= set(through):
        through.append(precise)
    arguments = (x, weight, root.epsilon, root.variance_size)
    needs_cast = weight is not None and dtype_of(weight) != "float32" and _weighs_precisely(end, scaled, dtype)
    own = tuple(each for each in dict.fromkeys(through) if each is not end)
    return Found(end, "rms_norm", arguments, own, weight_cast=1 if needs_cast else None)


def _require_scaled(scaled: fx.Node, root: Root) -> None:
    """Raise a miss unless a root scales the row whose mean square it is of, in float32 or promoted to it."""
    rows = {root.row, uncast(root.row)}
    if is_cast(root.row) and dtype_of(scaled) == "float32":
        rows.add(root.row.args[0])  # a product with a float32 root is taken in float32, of the same values
    takes = called(scaled) in (DIVISIONS if root.divides else _PRODUCTS)
    operands = pair(scaled) if takes else (None, None)
    if not rows & set(operands) or (root.divides and operands[1] is not root.end):
        raise Miss(f"`{root.end.name}` scales another tensor than the one whose mean square it is of")


def _whole(node: fx.Node) -> Found | None:
    """Read torch's own norm: in float32 over the last dimension, weighed there, rounded once."""
    x: Any = node.args[0]
    spec, dims = spec_of(x), argument(node, 1, "normalized_shape")
    if spec is None or spec.dtype not in ("float32", "bfloat16", "float16"):
        raise Miss(f"`{node.name}` norms `{dtype_of(x)}`")
    if not isinstance(dims, tuple | list) or len(dims) != 1:
        raise Miss(f"`{node.name}` is no norm over the last dimension alone")
    weight, epsilon = argument(node, 2, "weight"), argument(node, 3, "eps")
    if weight is not None and dtype_of(weight) not in ("float32", spec.dtype):
        raise Miss(f"the weight is `{dtype_of(weight)}` where the row is `{spec.dtype}`")
    if not _lies_alike(spec, spec_of(node)):
        raise Miss(f"`{node.name}` lies in another way than `{x.name}`")
    least = torch.finfo(torch.float32).eps if epsilon is None else epsilon
    needs_cast = weight is not None and dtype_of(weight) != "float32"
    return Found(node, "rms_norm", (x, weight, float(least), None), (), weight_cast=1 if needs_cast else None)


def _lies_alike(given: TensorSpec, made: TensorSpec | None) -> bool:
    """Tell whether torch's norm lays its result out as our operator does, which goes by its argument."""
    if made is None or given.stride is None or given.stride == made.stride:
        return made is not None and given.stride == made.stride
    falls = [each for each in given.stride if isinstance(each, int)]
    return made.stride is None and len(falls) == len(given.stride) and falls == sorted(falls, reverse=True)


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
