"""Merging of parallel linears: linears of one input become one product over weights that lie one after another.

Taken are linears of the very same value, with no cut and no write to it between them, whose weights are parameters of
one dtype and one width that nothing else reads: no tied weight, no computed one, no buffer, no quantised dtype, and
biases on all of them or on none. Their results are views of the product; where an operator that is not torch's own, or
the caller, would see other strides than before, the view is copied to the strides that it had.

On a CPU a product takes as long as its parts do, and what reads parts of its result takes longer: there only
`merge_linears_everywhere` merges, for whoever compares.
"""

from __future__ import annotations

import math
import operator
import os.path
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from piecework.passes.declare import graph_pass
from piecework.seam.kinds import is_state, is_view, mutated_arguments, names_operator, operator_name, storage_of
from piecework.seam.propagate import as_traced
from piecework.values.graph import Binding, TracedGraph
from piecework.values.rewriting import Rewritten
from piecework.values.signature import TensorSpec
from piecework.values.tree import tree_leaves

LINEAR = torch.nn.functional.linear
DTYPES = ("float32", "bfloat16", "float16", "float64")


@graph_pass("merge_linears", version=2)
def merge_linears(traced: TracedGraph) -> Rewritten:
    """Replace each set of parallel linears by one product and a split of its result, where that gains something."""
    return _merge_all(traced, leaves_cpu=True)


@graph_pass("merge_linears_everywhere", version=1)
def merge_linears_everywhere(traced: TracedGraph) -> Rewritten:
    """Do so on a CPU as well."""
    return _merge_all(traced, leaves_cpu=False)


def _merge_all(traced: TracedGraph, *, leaves_cpu: bool) -> Rewritten:
    matches: list[str] = []
    misses: list[str] = []
    bindings = dict(traced.bindings)
    static = set(_static_results(traced))
    written = {storage_of(a.meta.get("example_value")) for n in traced.graph.nodes for a in mutated_arguments(n)}
    for group in _parallel(traced):
        if leaves_cpu and _is_on_cpu(group[0]):
            misses.append(f"{_name(group, traced)}: on a CPU one product is not faster than several")
            continue
        fits: dict[object, list[fx.Node]] = {}
        for node in group:
            reason = _unfit(node, traced, static, written)
            if reason:
                misses.append(f"{_title(node, traced)}: {reason}")
            else:
                fits.setdefault(_kind(node), []).append(node)
        if len(fits) > 1:
            misses.append(f"{_name(group, traced)}: their biases or dtypes differ")
        for alike in fits.values():
            if len(alike) > 1:
                matches.append(_name(alike, traced))
                _merge(alike, traced, bindings)
    return Rewritten(replace(traced, bindings=bindings), tuple(matches), tuple(misses))


def _parallel(traced: TracedGraph) -> Iterator[list[fx.Node]]:
    """Yield the linears of one value between which nothing is cut and the value is not written."""
    open_groups: dict[fx.Node, list[fx.Node]] = {}
    done: list[list[fx.Node]] = []
    for node in traced.graph.nodes:
        if is_state(node) or names_operator(node, traced.split_ops):
            done += open_groups.values()
            open_groups = {}
        touched = {storage_of(argument.meta.get("example_value")) for argument in mutated_arguments(node)} - {0}
        for source in [s for s in open_groups if touched and storage_of(s.meta.get("example_value")) in touched]:
            done.append(open_groups.pop(source))
        if node.op == "call_function" and node.target is LINEAR and isinstance(_source(node), fx.Node):
            open_groups.setdefault(_source(node), []).append(node)
    for group in [*done, *open_groups.values()]:
        if len(group) > 1:
            yield group


def _source(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _operands(node: fx.Node) -> tuple[object, object]:
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return weight, bias


def _unfit(node: fx.Node, traced: TracedGraph, static: set[str], written: set[int]) -> str:
    """Say why a linear cannot be part of a product, or nothing."""
    weight, bias = _operands(node)
    for what, value in (("weight", weight), ("bias", bias)):
        if value is None and what == "bias":
            continue
        if not isinstance(value, fx.Node) or value.op != "placeholder":
            return f"its {what} is computed"
        binding, spec = traced.bindings[value.name], value.meta["spec"]
        if binding.kind != "weight":
            return f"its {what} is a {binding.kind}, no parameter"
        if binding.aliases or binding.name in static or set(value.users) != {node}:
            return f"its {what} is used elsewhere as well"
        if not isinstance(spec, TensorSpec) or spec.dtype not in DTYPES or spec.stride is not None:
            return f"its {what} is `{spec}`"
        if len(spec.shape) != (2 if what == "weight" else 1) or storage_of(value.meta["example_value"]) in written:
            return f"its {what} is `{spec}`, or written to"
    if storage_of(node.meta["example_value"]) in written:
        return "its result is written to in place"
    return ""


def _is_on_cpu(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    return isinstance(spec, TensorSpec) and spec.device == "cpu"


def _kind(node: fx.Node) -> tuple[object, ...]:
    """Return what linears of one product have in common."""
    weight, bias = _operands(node)
    assert isinstance(weight, fx.Node)
    spec = weight.meta["spec"]
    other = bias.meta["spec"].dtype if isinstance(bias, fx.Node) else ""
    return spec.dtype, spec.shape[1], spec.device, other


def _merge(group: Sequence[fx.Node], traced: TracedGraph, bindings: dict[str, Binding]) -> None:
    graph, first = traced.graph, group[0]
    operands = [_operands(node) for node in group]
    weight = _packed([pair[0] for pair in operands], traced, bindings)
    bias = _packed([pair[1] for pair in operands], traced, bindings) if operands[0][1] is not None else None
    rows = [int(pair[0].meta["spec"].shape[0]) for pair in operands]  # type: ignore[attr-defined]
    with graph.inserting_before(first):
        product = graph.call_function(LINEAR, (_source(first), weight, bias))
        split = graph.call_function(torch.split, (product, rows, -1))
        items = [graph.call_function(operator.getitem, (split, index)) for index in range(len(group))]
        exact = [
            graph.call_method("clone", (item,), {"memory_format": torch.contiguous_format})
            if _shows_strides(node, node)
            else item
            for node, item in zip(group, items, strict=True)
        ]
    for node, item in zip(group, exact, strict=True):
        node.replace_all_uses_with(item)
        graph.erase_node(node)


def _packed(parts: Sequence[object], traced: TracedGraph, bindings: dict[str, Binding]) -> fx.Node:
    """Make the placeholder of tensors that will lie one after another."""
    nodes = [part for part in parts if isinstance(part, fx.Node)]
    specs = [node.meta["spec"] for node in nodes]
    names = [bindings[node.name].name for node in nodes]
    rows = sum(int(spec.shape[0]) for spec in specs)
    with traced.graph.inserting_before(nodes[0]):
        made = traced.graph.placeholder(f"{nodes[0].name}merged")
    with as_traced(traced.graph):
        made.meta["example_value"] = torch.cat([node.meta["example_value"] for node in nodes])
    spec = replace(specs[0], shape=(rows, *specs[0].shape[1:]))
    made.meta["spec"] = spec
    together = tuple((name, int(one.shape[0])) for name, one in zip(names, specs, strict=True))
    bindings[made.name] = Binding("weight", " + ".join(names), spec, parts=together)
    return made


def _shows_strides(node: fx.Node, item: fx.Node) -> bool:
    """Tell whether other strides of `node`, a view of a linear's result `item`, would be seen or refused."""
    for user in node.users:
        name = str(user.target) if user.op == "call_method" else str(getattr(user.target, "__name__", ""))
        if user.op == "output":
            return True
        if operator_name(user) and not operator_name(user).startswith("aten::"):
            return True
        if name in ("view", "view_as", "as_strided", "stride", "is_contiguous", "data_ptr"):
            if node is not item or not _splits_last(user, item) or _shows_strides(user, item):
                return True
        elif name == "contiguous" and not _is_one_row(node, item):
            continue  # it is copied: its strides are its own
        elif is_view(user) and _shows_strides(user, item):
            return True
    return False


def _is_one_row(view: fx.Node, item: fx.Node) -> bool:
    """Tell whether a view may hold no more than one row of the result: then it is contiguous whatever its strides."""
    spec, given = view.meta.get("spec"), item.meta.get("spec")
    if not isinstance(spec, TensorSpec) or not isinstance(given, TensorSpec):
        return True
    fixed = [size for size in spec.shape if isinstance(size, int)]
    return math.prod(fixed) <= int(given.shape[-1]) and (len(fixed) == len(spec.shape))


def _splits_last(view: fx.Node, item: fx.Node) -> bool:
    """Tell whether a view leaves all sizes but the last as they are: then it is one of strided rows as well."""
    spec, given = view.meta.get("spec"), item.meta.get("spec")
    if not isinstance(spec, TensorSpec) or not isinstance(given, TensorSpec) or spec.dtype != given.dtype:
        return False
    return spec.shape[: len(given.shape) - 1] == given.shape[:-1]


def _static_results(traced: TracedGraph) -> Iterator[str]:
    """Yield the names of weights that the model returns as they are."""
    return (str(leaf["static"]) for leaf in tree_leaves(traced.result) if "static" in leaf)


def _title(node: fx.Node, traced: TracedGraph) -> str:
    weight = _operands(node)[0]
    is_named = isinstance(weight, fx.Node) and weight.name in traced.bindings
    return traced.bindings[weight.name].name if is_named else node.name  # type: ignore[attr-defined]


def _name(group: Sequence[fx.Node], traced: TracedGraph) -> str:
    """Name a group by what its weights' names have in common and what they have not."""
    names = [_title(node, traced).removesuffix(".weight") for node in group]
    common = os.path.commonprefix(names).rpartition(".")[0]
    short = [name.removeprefix(f"{common}.") if common else name for name in names]
    return f"{common}: {' + '.join(short)}" if common else " + ".join(short)
