"""Sequence parallelism: between a sum over the ranks and what needs every row, each rank works on a share of them.

    all-reduce -> add, norm -> linear   becomes   reduce-scatter -> add, norm on 1/R of the rows -> all-gather -> linear

An all-reduce is a reduce-scatter and an all-gather in one, so that what goes over the wire stays the same. The residual
stream keeps its share from layer to layer, and so crosses the cuts around attention, shorter than it was. That is right
since the whole graph is rewritten before it is cut; a pass on one piece may not do it.

Rows are filled up with zeros to a multiple of the ranks. Taken are operations that treat each row by itself; a value
that anything else reads is gathered first. Nothing is changed where more would be gathered than was summed.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from piecework.passes.declare import graph_pass
from piecework.passes.reading import argument, call, called, drop, form_of, is_cast, spec_of
from piecework.seam.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, overload
from piecework.seam.kinds import is_view, mutated_arguments, operator_name
from piecework.values.graph import TracedGraph
from piecework.values.placement import ranks_of
from piecework.values.rewriting import Rewritten
from piecework.values.signature import ScalarSpec

_BY_ELEMENT = {
    "add", "sub", "mul", "div", "truediv", "neg", "pow", "square", "rsqrt", "sqrt", "reciprocal", "tanh", "sigmoid",
    "silu", "gelu", "relu", "exp", "abs", "clone", "contiguous",
}  # fmt: skip
_OF_LAST = {"mean", "sum", "var"}
_NORMS = {"rms_norm", "layer_norm"}
_OURS = {"rms_norm", "fused_add_rms_norm"}


@graph_pass("sequence_parallel", version=1, expects_match=True)
def sequence_parallel(traced: TracedGraph) -> Rewritten:
    """Let each rank work on its share of the rows between a sum over the ranks and the next product."""
    graph = traced.graph
    symbols = {b.name: n for n in graph.find_nodes(op="placeholder") if (b := traced.bindings[n.name]).kind == "symbol"}
    sums = [node for node in graph.nodes if _is_sum(node, symbols)]
    misses: list[str] = []
    while True:
        shared = _shared(graph, sums)
        gathered = [node for node in shared if any(user not in shared for user in node.users)]
        at_once = [node for node in sums if node in gathered]
        if not at_once:
            break
        misses += [f"{node.name}: its sum is needed whole at once" for node in at_once]
        sums = [node for node in sums if node not in at_once]
    written = {a.name for node in graph.nodes for a in mutated_arguments(node) if a in shared}
    if written or len(gathered) > len(sums):
        why = f"`{min(written)}` is written in place" if written else f"{len(gathered)} values would be gathered"
        return Rewritten(traced, (), (*misses, *(f"{node.name}: {why}, for {len(sums)} sums" for node in sums)))
    if sums:
        _rewrite(sums, shared, gathered, symbols)
    return Rewritten(traced, tuple(_title(node, sums) for node in sums), tuple(misses))


def _rewrite(
    sums: Sequence[fx.Node], shared: Collection[fx.Node], gathered: Sequence[fx.Node], symbols: Mapping[str, fx.Node]
) -> None:
    """Share out the rows of sums, and gather what others read of what follows from them."""
    group = str(sums[0].args[0].args[2])  # type: ignore[union-attr]
    wholes = {node: [user for user in node.users if user not in shared] for node in gathered}
    for node in shared:
        leading = len(spec_of(node).shape) - 2 if spec_of(node) is not None else 0  # type: ignore[union-attr]
        made = node
        if node in sums:
            made = _scatter(node, group, leading)
        elif _is_plain_view(node):
            made = _reshape(node, leading)
        if node in wholes:
            rows = symbols[str(_rows(spec_of(node).shape))]  # type: ignore[union-attr]
            _gather(made, rows, group, leading, wholes[node])


def _is_sum(node: fx.Node, symbols: dict[str, fx.Node]) -> bool:
    """Tell whether a node waits for a sum over ranks that share a model, of rows that are counted by a symbol."""
    if operator_name(node).partition(".")[0] != WAIT or not isinstance(node.args[0], fx.Node):
        return False
    reduce, spec = node.args[0], spec_of(node)
    if operator_name(reduce).partition(".")[0] != ALL_REDUCE or reduce.args[1] != "sum" or len(reduce.users) != 1:
        return False
    return bool(ranks_of(str(reduce.args[2]))) and spec is not None and _rows(spec.shape) in symbols


def _rows(shape: tuple[int | str, ...]) -> int | str:
    """Return the rows of `[1, …, T, E]`; 0 for any other shape."""
    return shape[-2] if len(shape) > 1 and all(size == 1 for size in shape[:-2]) else 0


def _shared(graph: fx.Graph, sums: list[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that can work on a share of the rows, in order: the sums, and what treats each row by itself."""
    shared: dict[fx.Node, None] = dict.fromkeys(sums)
    for node in graph.nodes:
        if node not in shared and any(each in shared for each in node.all_input_nodes) and _is_by_row(node, shared):
            shared[node] = None
    for node in reversed(list(graph.nodes)):  # several views of one value are taken after it is gathered, once
        if node in shared and _is_plain_view(node) and not any(user in shared for user in node.users):
            del shared[node]
    order = {node: place for place, node in enumerate(graph.nodes)}
    return dict.fromkeys(sorted(shared, key=order.__getitem__))


def _is_plain_view(node: fx.Node) -> bool:
    """Tell whether a node gives rows of other leading dimensions, and no other numbers."""
    return is_view(node) and not is_cast(node) and node.target is not operator.getitem


def _is_by_row(node: fx.Node, shared: dict[fx.Node, None]) -> bool:
    if node.target is operator.getitem and form_of(node.args[0]) in _OURS:
        return node.args[0] in shared
    spec = spec_of(node)
    tells = spec is not None or form_of(node) in _OURS
    if not tells or node.meta.get("number") or mutated_arguments(node):
        return False
    for each in node.all_input_nodes:
        if each not in shared and not _is_number(each) and not _has_no_rows(each):
            return False
    first = next(spec_of(each) for each in node.all_input_nodes if each in shared)
    if form_of(node) in _OURS:
        return True
    if spec is None or first is None or _rows(spec.shape) != _rows(first.shape):
        return False
    name = called(node)
    if is_cast(node) or name in _BY_ELEMENT:
        return True
    if name in _OF_LAST:
        return argument(node, 1, "dim") in (-1, [-1], (-1,)) and argument(node, 2, "keepdim", False) is True
    if name in _NORMS:
        return len(argument(node, 1, "normalized_shape", ())) == 1
    return is_view(node) and name in ("view", "reshape", "flatten", "unsqueeze", "squeeze") and spec.stride is None


def _is_number(node: fx.Node) -> bool:
    """Tell whether a node gives a size, or what follows from sizes."""
    is_symbol = node.op == "placeholder" and spec_of(node) is None
    return is_symbol or bool(node.meta.get("number")) or isinstance(node.meta.get("spec"), ScalarSpec)


def _has_no_rows(node: fx.Node) -> bool:
    """Tell whether a tensor's sizes are all fixed: it does not grow with the tokens of a step."""
    spec = spec_of(node)
    return spec is not None and not any(isinstance(size, str) for size in spec.shape)


def _scatter(wait: fx.Node, group: str, leading: int) -> fx.Node:
    """Put a reduce-scatter in the place of an all-reduce and its wait."""
    graph, reduce = wait.graph, wait.args[0]
    assert isinstance(reduce, fx.Node)
    with graph.inserting_before(wait):
        filled = call(graph, "fill_rows", reduce.args[0], ranks_of(group))
        started = graph.call_function(overload(REDUCE_SCATTER), (filled, "sum", ranks_of(group), group))
        own = _with_leading(graph.call_function(overload(WAIT), (started,)), leading)
    wait.replace_all_uses_with(own)
    drop(wait)
    return own


def _gather(node: fx.Node, rows: fx.Node, group: str, leading: int, users: Sequence[fx.Node]) -> None:
    """Let users of a share read all rows."""
    graph = node.graph
    with graph.inserting_before(node.next):
        flat = graph.call_method("flatten", (node, 0, -2)) if leading else node
        started = graph.call_function(overload(ALL_GATHER), (flat, ranks_of(group), group))
        joined = graph.call_function(overload(WAIT), (started,))
        whole = _with_leading(call(graph, "first_rows", joined, rows), leading)
    for user in users:
        user.replace_input_with(node, whole)


def _reshape(node: fx.Node, leading: int) -> fx.Node:
    """Write a view of all rows so that it holds for a share of them too."""
    with node.graph.inserting_before(node):
        made = _with_leading(node.graph.call_method("flatten", (node.args[0], 0, -2)), leading)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return made


def _with_leading(flat: fx.Node, leading: int) -> fx.Node:
    """Give rows so many leading dimensions of 1."""
    for _ in range(leading):
        flat = flat.graph.call_method("unsqueeze", (flat, 0))
    return flat


def _title(wait: fx.Node, sums: Sequence[fx.Node]) -> str:
    place = "first" if wait is sums[0] else "last" if wait is sums[-1] else "middle"
    return f"{wait.name}: the {place} of {len(sums)} sums is shared out by rows"
