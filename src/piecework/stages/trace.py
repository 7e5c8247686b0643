"""Trace: a model and example inputs become one full graph whose inputs are named.

Dynamo runs at sizes of our own choice (never 0, and 1 only for size 1 alone); weights, buffers and constants
are recognised by identity; the result's structure is recovered, so that neither a cold nor a warm program
passes through Dynamo when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from piecework.errors import GuardError, TraceError
from piecework.seam import dynamo
from piecework.seam.fake import without_weights
from piecework.seam.guard_notes import GuardNote
from piecework.seam.identity import refuse_identity
from piecework.seam.input_names import name_inputs, unowned_inputs
from piecework.seam.lines import line_that_fixed
from piecework.seam.live_guards import LiveGuards
from piecework.seam.names import refuse_nameless
from piecework.seam.nested import inline_nested
from piecework.seam.results import describe_result
from piecework.seam.returned import take_in, unread
from piecework.seam.shape_guards import read_shape_guards, sizes_by_source, source_of_size
from piecework.seam.shared_writes import refuse_shared_writes
from piecework.seam.squeezes import squeeze_guards
from piecework.seam.symbols import SymbolTable, use_symbols
from piecework.seam.writes import refuse_tensor_writes
from piecework.values.arguments import (
    LeafDims,
    bind_arguments,
    check_leaves,
    dynamic_leaves,
    linked_sizes,
    resize,
    symbol_sources,
    trace_sizes,
)
from piecework.values.attributes import read_attributes, refuse_writes
from piecework.values.declaration import Dim, Dynamic
from piecework.values.graph import Binding, InputLeaf, ShapeGuard, TracedGraph
from piecework.values.shapes import Range
from piecework.values.signature import ScalarSpec, Spec, TensorSpec
from piecework.values.tree import Tree, containers, leaves

Traced = TypeVar("Traced")


def trace(
    model: torch.nn.Module,
    example: Sequence[Any] | Mapping[str, Any],
    dynamic: Dynamic,
    *,
    device: str = "cpu",
    bounds: Mapping[str, Range] | None = None,
) -> TracedGraph:
    """Trace `model` to one full graph for the presence pattern of `example`, at sizes inside `bounds`.

    A size whose bounds are one number is that constant. Where the graph holds for some sizes only, its shape
    guards say so. A model whose parameters are on the meta device is traced without weights, as if they were
    on `device`.
    """
    given = bind_arguments(model.forward, example)
    dims = dynamic_leaves(given, dynamic)
    within = bounds or {}
    return _at_sizes(
        linked_sizes(given, dims),
        within,
        lambda sizes, other: _trace_at(model, given, dims, sizes, other, within, device),
    )


def live_guards(
    model: torch.nn.Module,
    example: Sequence[Any] | Mapping[str, Any],
    dynamic: Dynamic,
    *,
    device: str = "cpu",
    bounds: Mapping[str, Range] | None = None,
) -> LiveGuards:
    """Trace `model` as `trace` does, and keep the conditions on sizes as guards that torch evaluates before a call."""
    given = bind_arguments(model.forward, example)
    dims = dynamic_leaves(given, dynamic)
    within = bounds or {}

    def at(sizes: Mapping[str, int], other: Mapping[str, int]) -> LiveGuards:
        with without_weights(model, resize(given, dims, sizes), device) as arguments:
            inputs = [(path, leaf) for name, value in arguments.items() for path, leaf in leaves(value, name)]
            varying = _varying(dims, within)
            guards = LiveGuards(model, arguments, dynamo.marks_for(inputs, varying), symbol_sources(dims))
            guards.conditions = _asked_of_squeezes(model, guards.captured, inputs, varying)
            return guards

    return _at_sizes(linked_sizes(given, dims), within, at)


def _asked_of_squeezes(
    model: torch.nn.Module, captured: dynamo.Capture, inputs: Sequence[tuple[str, Any]], varying: Sequence[LeafDims]
) -> tuple[ShapeGuard, ...]:
    """Return the conditions that torch has no guard for: that what is squeezed away is not 1."""
    nodes = list(captured.graph.graph.nodes)
    places = captured.graph.graph.find_nodes(op="placeholder")
    named = name_inputs(model, captured.inputs, inputs)
    by_path = {binding.name: node for node, binding in zip(places, named, strict=True) if binding}
    names, _ = _name_symbols(by_path, varying, sizes_by_source(nodes))
    return squeeze_guards(nodes, SymbolTable(names))


def _at_sizes(
    own: Mapping[str, int],
    within: Mapping[str, Range],
    attempt: Callable[[Mapping[str, int], Mapping[str, int]], Traced],
) -> Traced:
    """Return what an attempt gives at sizes of our choice, or where that fails at others; `own` are the example's."""
    sizes = trace_sizes(list(own), within, 0)
    other = trace_sizes(list(own), within, 1)
    try:
        return attempt(sizes, other)
    except TraceError as error:
        is_usable = own != sizes and all(
            n in within.get(name, (n,)) and (n > 1 or sizes[name] < 2) for name, n in own.items()
        )
        if not error.facts.get("fails") or not is_usable:
            raise
        # The inputs' values may agree with their sizes, and with no others.
        return attempt(own, own)
    except GuardError:
        if other == sizes:
            raise
        try:
            # The model may single the chosen size out, as in `tokens == 17`.
            return attempt(other, sizes)
        except (GuardError, TraceError):
            pass
        raise


def _trace_at(
    model: torch.nn.Module,
    given: Mapping[str, Any],
    dims: Sequence[LeafDims],
    sizes: Mapping[str, int],
    other: Mapping[str, int],
    bounds: Mapping[str, Range],
    device: str,
) -> TracedGraph:
    varying = _varying(dims, bounds)
    with without_weights(model, resize(given, dims, sizes), device) as arguments:
        inputs = [(path, leaf) for name, value in arguments.items() for path, leaf in leaves(value, name)]
        check_leaves(inputs)
        before = read_attributes(model)
        captured, result = dynamo.capture(model, (), arguments, dynamo.marks_for(inputs, varying))
        refuse_writes(model, before, captured.writes.in_place)
        try:
            named = name_inputs(model, captured.inputs, inputs)
            names = {mark.name for leaf in varying for mark in leaf.dims.values()}
            both = {name: (sizes[name], other[name]) for name in sorted(names)}
            held = unread(model, captured.inputs)
            tree = describe_result(captured, result, inputs, named, lambda: resize(arguments, dims, other), both, held)
            dynamo.check_again(captured, resize(arguments, dims, other))
            dynamo.check_again(captured, resize(arguments, dims, _rounded(other, bounds)))
            named = take_in(captured, named, held, tree)
            return _assemble(captured, tree, arguments, inputs, named, dims, varying, sizes)
        finally:
            dynamo.release(captured)


def _assemble(
    captured: dynamo.Capture,
    tree: Tree,
    arguments: Mapping[str, Any],
    inputs: Sequence[tuple[str, Any]],
    named: Sequence[Binding | None],
    dims: Sequence[LeafDims],
    varying: Sequence[LeafDims],
    sizes: Mapping[str, int],
) -> TracedGraph:
    inline_nested(captured.graph)
    refuse_identity(captured.code)
    graph = captured.graph.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    unowned = unowned_inputs(captured, named)
    refuse_shared_writes(graph, captured.inputs, named, unowned)
    refuse_tensor_writes(graph, {placeholders[index]: source for index, source in unowned.items()})
    by_path = {binding.name: node for node, binding in zip(placeholders, named, strict=True) if binding}
    names, equal = _name_symbols(by_path, varying, sizes_by_source(list(graph.nodes)))
    table = SymbolTable(names)
    for node in graph.nodes:
        if node.meta.get("example_value") is not None:
            node.meta["spec"] = table.spec(node.meta["example_value"])
    files = {code.co_filename for code in captured.code}
    guards = (
        *read_shape_guards(list(graph.nodes), table, files, equal),
        *squeeze_guards(list(graph.nodes), table),
        *_least_sizes(captured, varying),
    )
    symbols = use_symbols(graph, table)
    refuse_nameless(graph)
    bindings = {node.name: Binding("symbol", name, ScalarSpec("int")) for name, node in symbols.items()}
    for node, binding in zip(placeholders, named, strict=True):
        if binding is not None:
            bindings[node.name] = replace(binding, spec=node.meta["spec"])
    constants = {b.name: value for b, value in zip(named, captured.inputs, strict=True) if b and b.kind == "constant"}
    return TracedGraph(
        graph=graph,
        bindings=bindings,
        inputs=_input_leaves(inputs, by_path, table, dims),
        arguments=tuple(arguments),
        symbols=symbol_sources(dims),
        result=tree,
        constants=constants,
        shape_guards=guards,
        guards=(
            *captured.guards,
            *(GuardNote("CONTENT", source, captured.inputs[index], "") for index, source in unowned.items()),
        ),
        code=tuple(dict.fromkeys(captured.code)),
        sizes=sizes,
        containers=tuple(pair for name, value in arguments.items() for pair in containers(value, name)),
    )


def _rounded(sizes: Mapping[str, int], bounds: Mapping[str, Range]) -> dict[str, int]:
    """Return sizes that are multiples of eight where the bounds hold one: what an operator may round up to."""
    return {name: 8 if 8 in bounds.get(name, (8,)) else size for name, size in sizes.items()}


def _varying(dims: Sequence[LeafDims], bounds: Mapping[str, Range]) -> list[LeafDims]:
    """Return the dimensions that are symbols in this trace: those whose bounds are more than one number."""
    fixed = {name for name, bound in bounds.items() if bound.is_single}
    return [LeafDims(leaf.path, {d: m for d, m in leaf.dims.items() if m.name not in fixed}) for leaf in dims]


def _name_symbols(
    by_path: Mapping[str, torch.fx.Node], dims: Sequence[LeafDims], by_source: Mapping[str, Any]
) -> tuple[dict[Any, str], list[tuple[str, str]]]:
    """Return the declared name of each of Dynamo's symbols, and the pairs of names that the model takes for one."""
    names: dict[Any, str] = {}
    equal: list[tuple[str, str]] = []
    for leaf in dims:
        node = by_path.get(leaf.path)
        for dim, mark in leaf.dims.items():
            if node is not None:
                size = node.meta["example_value"].shape[dim]
                expression = size.node.expr if not isinstance(size, int) else None
            else:
                size = expression = by_source.get(source_of_size(leaf.path, dim))
                if expression is None:
                    continue
            if expression is None or not expression.is_Symbol:
                raise GuardError(
                    f"dimension `{mark.name}` (`{leaf.path}.shape[{dim}]`) is declared dynamic, and the model fixes it "
                    f"to `{size}`{line_that_fixed(size)}",
                    hint=f"leave dimension {dim} of `{leaf.path}` out of `dynamic`, or change the line that fixes it",
                    facts={"dimension": mark.name, "argument": leaf.path, "size": str(size)},
                )
            known = names.setdefault(expression, mark.name)
            if known != mark.name and (known, mark.name) not in equal:
                equal.append((known, mark.name))
    return names, equal


def _input_leaves(
    inputs: Sequence[tuple[str, Any]],
    by_path: Mapping[str, torch.fx.Node],
    table: SymbolTable,
    dims: Sequence[LeafDims],
) -> tuple[InputLeaf, ...]:
    marks = {leaf.path: leaf.dims for leaf in dims}
    first: dict[int, str] = {}
    found = []
    for path, leaf in inputs:
        if not isinstance(leaf, torch.Tensor):
            found.append(InputLeaf(path, None, leaf))
            continue
        node = by_path.get(path)
        spec = _declared_spec(leaf, node.meta["spec"] if node is not None else None, marks.get(path, {}), table)
        found.append(InputLeaf(path, spec, same_as=first.setdefault(id(leaf), path) if id(leaf) in first else ""))
        first.setdefault(id(leaf), path)
    return tuple(found)


def _declared_spec(leaf: torch.Tensor, traced: Spec | None, marks: Mapping[int, Dim], table: SymbolTable) -> TensorSpec:
    """Describe an input by its declared names; one that the graph does not read is asked for no strides."""
    plain = traced or table.spec(leaf)
    assert isinstance(plain, TensorSpec)
    shape = tuple(marks[dim].name if dim in marks else size for dim, size in enumerate(plain.shape))
    return TensorSpec(plain.dtype, shape, plain.stride if traced else None, plain.device)


def _least_sizes(captured: dynamo.Capture, dims: Sequence[LeafDims]) -> tuple[ShapeGuard, ...]:
    """Say so where a trace took sizes to be 2 or more: what it decided at 0 and 1 left no guard."""
    if captured.is_oblivious:
        return ()
    names = dict.fromkeys(mark.name for leaf in dims for mark in leaf.dims.values() if mark.kind != "unbacked")
    return tuple(ShapeGuard(f"{name} >= 2", "") for name in names)
