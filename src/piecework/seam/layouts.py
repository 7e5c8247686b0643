"""What a compiled piece gives lies as the graph says: the next region was compiled for these strides.

Two things move a result. Torch takes operators apart before it compiles, and some of these decompositions give a
result that lies in another order than the operator's own (`cat` of one tensor that is not empty). And a pass over a
functional piece may change what crosses a cut. The first is mended where it arises, so that what follows (views,
results made alike, opaque operators inside the piece) is traced as it will be; the second at the piece's results.

The stride of a dimension that holds one element says nothing and is never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from piecework.seam.kinds import storage_of

Table = dict[Any, Callable[..., Any]]
_OWN_MEMORY = ("non_alias", "unsafe_view_alias", "custom_function_view")  # results that are no view of an input


def strict_decompositions(table: Mapping[Any, Callable[..., Any]]) -> Table:
    """Return decompositions whose results lie as those of the operators that they stand for."""
    strict = dict(table)
    for name in _MOVING:
        operator = getattr(torch.ops.aten, name).default
        if operator in strict:
            strict[operator] = partial(_strict, operator, strict[operator])
    return strict


# Found by running each decomposition of torch beside its operator, on samples that lie in every order.
_MOVING = ("cat", "put", "view_copy", "fmax", "fmin", "upsample_nearest1d", "_upsample_nearest_exact1d")


def _strict(operator: Any, decomposition: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    found = decomposition(*args, **keywords)
    if not isinstance(found, torch.Tensor):
        return found
    with disable_proxy_modes_tracing():
        wanted = operator(*args, **keywords)
    order = None if lies_alike(found, wanted) else order_of(wanted)
    return found if order is None else _relaid(found, order)


def keep_results(graph: fx.Graph, wanted: Sequence[Any], metadata: Any) -> int:
    """Give results of a functional piece the strides of `wanted`, its own graph's; return how many nodes were added.

    Left as they are: views of inputs, and results of which another is a view.
    """
    results: Any = graph.output_node().args[0]
    if not len(results) == len(wanted) == len(metadata.output_info):
        return 0
    before = len(graph.nodes)
    memory = [storage_of(each) for each in wanted if isinstance(each, torch.Tensor)]
    made = list(results)
    for index, (node, right, told) in enumerate(zip(results, wanted, metadata.output_info, strict=True)):
        given = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(given, torch.Tensor) or not isinstance(right, torch.Tensor):
            continue
        if told.output_type.name not in _OWN_MEMORY:
            continue
        order = order_of(right)
        if order is None:
            _keep_base(graph, node)
        elif not lies_alike(given, right) and memory.count(storage_of(right)) == 1:
            made[index] = _relay_node(graph, node, order)
    graph.output_node().args = (type(results)(made),)
    return len(graph.nodes) - before


def _keep_base(graph: fx.Graph, result: fx.Node) -> None:
    """Have what a result with gaps or overlaps is a view of made for itself.

    Inductor else writes the result as a tensor of its own, without the gaps.
    """
    base, view = result, result
    while getattr(base.target, "is_view", False) and isinstance(base.args[0], fx.Node):
        base, view = base.args[0], base
    given = base.meta.get("val")
    if base is result or base.op == "placeholder" or not isinstance(given, torch.Tensor) or order_of(given) is None:
        return
    with graph.inserting_before(view):
        sizes = [_number(graph, torch.ops.aten.sym_size.int, base, dim) for dim in range(given.dim())]
        steps = [_number(graph, torch.ops.aten.sym_stride.int, base, dim) for dim in range(given.dim())]
        # All of it, as it lies: the compiler makes what this reads, and makes it with these strides.
        whole = _call(graph, torch.ops.aten.as_strided.default, base, sizes, steps)
    view.args = (whole, *view.args[1:])


def _number(graph: fx.Graph, operator: Any, base: fx.Node, dim: int) -> Any:
    found = operator(base.meta["val"], dim)
    return found if isinstance(found, int) else _call(graph, operator, base, dim)


def _call(graph: fx.Graph, operator: Any, *args: Any, **keywords: Any) -> fx.Node:
    made = graph.call_function(operator, args, keywords)
    given: Any = fx.map_arg(args, lambda each: each.meta["val"])
    mode = next(each.meta["val"].fake_mode for each in args if isinstance(each, fx.Node))
    with mode, torch.no_grad():
        made.meta["val"] = operator(*given, **keywords)
    return made


def lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two fakes of one shape surely have the same strides wherever a dimension has more than one element.

    Tensors:
        one, other  [...]  any
    """
    pairs = zip(one.shape, other.shape, one.stride(), other.stride(), strict=True)
    steps = [(a, b) for size, again, a, b in pairs if not _is(size, 1) or not _is(again, 1)]
    return any(_is(size, 0) for size in other.shape) or all(_is(a, b) for a, b in steps)


def order_of(wanted: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from the slowest to the fastest; None where elements overlap or leave gaps.

    Tensors:
        wanted  [...]  any  fake: its sizes are judged at their hints, which assumes nothing of them
    """
    sizes, steps = [_hint(size) for size in wanted.shape], [_hint(step) for step in wanted.stride()]
    if None in sizes or None in steps:
        return None
    order = sorted(range(wanted.dim()), key=lambda dim: (-steps[dim], dim))  # type: ignore[operator]
    expected = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and steps[dim] != expected:
            return None
        expected *= sizes[dim]  # type: ignore[operator]
    return tuple(order)


def _is(one: Any, other: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return one == other if type(one) is type(other) is int else bool(statically_known_true(one == other))


def _hint(size: Any) -> int | None:
    found = size if isinstance(size, int) else size.node.hint
    return None if found is None else int(found)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _relaid(found: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return found.permute(order).clone(memory_format=torch.contiguous_format).permute(_inverse(order))


def _relay_node(graph: fx.Graph, node: fx.Node, order: tuple[int, ...]) -> fx.Node:
    aten = torch.ops.aten
    with graph.inserting_before(graph.output_node()):
        turned = _call(graph, aten.permute.default, node, list(order))
        copied = _call(graph, aten.clone.default, turned, memory_format=torch.contiguous_format)
        return _call(graph, aten.permute.default, copied, _inverse(order))
