"""Fuse calls of our operators that stand next to each other.

fuse_add_norm   a sum that a norm reads: same shape and dtype on both sides, and everyone else reads the sum later
fuse_quant      a norm or a gated activation whose result nobody reads but quantisations that are all the same
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from piecework.ops.fused import DYNAMIC, FUSED_FORMS, STATIC
from piecework.ops.operators import operators
from piecework.passes.found import rewrite_each
from piecework.passes.reading import Miss, argument, call, called, drop, form_of, spec_of
from piecework.values.graph import TracedGraph


def fuse_add_norm(traced: TracedGraph) -> tuple[list[str], list[str]]:
    """Fuse each norm with the sum that it reads; the norm then sees the sum before it is rounded."""
    return rewrite_each(traced, "rms_norm", _fuse_add)


def fuse_quant(traced: TracedGraph, wanted: frozenset[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Fuse each norm or activation with the quantisation of its result, for the pairs of forms that are wanted."""
    matches: list[str] = []
    misses: list[str] = []
    for form in dict.fromkeys(producer for producer, _ in FUSED_FORMS):
        found, left = rewrite_each(traced, form, lambda graph, node: _fuse_quant(graph, node, wanted))
        matches, misses = [*matches, *found], [*misses, *left]
    return matches, misses


# --------------------------------------------------------------------------------------------------- sum and norm


def _fuse_add(graph: fx.Graph, norm: fx.Node) -> str:
    total = norm.args[0]
    if called(total) != "add" or not isinstance(total, fx.Node) or total.kwargs or len(total.args) != 2:
        return ""
    x, residual = total.args
    one, other, whole = spec_of(x), spec_of(residual), spec_of(total)
    if one is None or other is None or whole is None:
        return ""
    if one.shape != other.shape or one.dtype != other.dtype:
        raise Miss(f"`{total.name}` adds `{one}` and `{other}`")
    _require_later(graph, total, norm)
    name = norm.name
    with graph.inserting_before(norm):
        fused = call(graph, "fused_add_rms_norm", x, residual, *_norm_arguments(norm))
        normed = graph.call_function(operator.getitem, (fused, 0))
        summed = graph.call_function(operator.getitem, (fused, 1))
    # Later norms of this pass look at what they add; values are computed when the pass is done.
    normed.meta["spec"], summed.meta["spec"] = spec_of(norm), whole
    norm.replace_all_uses_with(normed)
    graph.erase_node(norm)
    total.replace_all_uses_with(summed)
    drop(total)
    if not summed.users:
        graph.erase_node(summed)
    return f"fused_add_rms_norm for {name}"


def _norm_arguments(norm: fx.Node) -> tuple[Any, ...]:
    first = 1 if form_of(norm) == "rms_norm" else 2
    names = ("weight", "epsilon", "variance_size")
    return tuple(argument(norm, first + index, name) for index, name in enumerate(names))


def _require_later(graph: fx.Graph, total: fx.Node, norm: fx.Node) -> None:
    """Raise a miss where someone reads a sum before the norm does: it is computed there, and no earlier."""
    waiting = set(total.users) - {norm}
    for node in graph.nodes:
        if node is norm:
            return
        if node in waiting:
            raise Miss(f"`{node.name}` reads `{total.name}` before the norm")


# ------------------------------------------------------------------------------------------ producer and quantisation


def _fuse_quant(graph: fx.Graph, producer: fx.Node, wanted: frozenset[tuple[str, str]]) -> str:
    form = form_of(producer)
    result = _only_result(producer) if form == "fused_add_rms_norm" else producer
    users = list(result.users) if result is not None else []
    quants = [user for user in users if form_of(user) in (STATIC, DYNAMIC)]
    if result is None or not quants:
        return ""
    first = quants[0]
    if (form, form_of(first)) not in wanted:
        return ""
    stranger = next((user for user in users if user not in quants), None)
    if stranger is not None:
        raise Miss(f"`{stranger.name}` reads `{result.name}` too")
    tail = _quant_arguments(first)
    if any(form_of(each) != form_of(first) or _quant_arguments(each) != tail for each in quants):
        raise Miss(f"`{result.name}` is quantised in more than one way")
    name = producer.name
    with graph.inserting_before(first):
        fused = call(graph, FUSED_FORMS[form, form_of(first)], *_all_arguments(producer), *tail)
        items = [fused]
        count = (1 if form_of(first) == STATIC else 2) + (form == "fused_add_rms_norm")
        if count > 1:
            items = [graph.call_function(operator.getitem, (fused, index)) for index in range(count)]
    _take_over(graph, producer, result, quants, items)
    return f"{form_of(fused)} for {name}"


def _only_result(producer: fx.Node) -> fx.Node | None:
    """Return the item that holds a fused norm's rows."""
    return next((user for user in producer.users if called(user) == "getitem" and user.args[1] == 0), None)


def _quant_arguments(quant: fx.Node) -> tuple[Any, ...]:
    names = ("scale",) if form_of(quant) == STATIC else ("per_token", "group_size")
    return tuple(argument(quant, 1 + index, name) for index, name in enumerate(names))


def _all_arguments(producer: fx.Node) -> tuple[Any, ...]:
    operator_of = operators.of_form(form_of(producer))
    assert operator_of is not None
    names = operator_of.form(form_of(producer)).arguments
    return tuple(argument(producer, index, name) for index, name in enumerate(names))


def _take_over(
    graph: fx.Graph, producer: fx.Node, result: fx.Node, quants: list[fx.Node], items: list[fx.Node]
) -> None:
    """Let the readers of the quantised rows, their scales and the sum read the fused call's results."""
    has_sum = form_of(producer) == "fused_add_rms_norm"
    rows = items[:-1] if has_sum else items
    for quant in quants:
        if len(rows) == 1:
            quant.replace_all_uses_with(rows[0])
        else:
            for item in list(quant.users):
                item.replace_all_uses_with(rows[item.args[1]])  # type: ignore[index]
                graph.erase_node(item)
        graph.erase_node(quant)
    if has_sum:
        _move_sum(graph, producer, result, items[-1])
    else:
        graph.erase_node(producer)
    for item in items:
        if item is not items[0] and not item.users:
            graph.erase_node(item)


def _move_sum(graph: fx.Graph, producer: fx.Node, result: fx.Node, made: fx.Node) -> None:
    graph.erase_node(result)
    for item in list(producer.users):
        item.replace_all_uses_with(made)
        graph.erase_node(item)
    graph.erase_node(producer)
