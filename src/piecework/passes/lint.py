"""Hold a graph to what it was before a pass: well formed, with the inputs, results and writes that it had.

For a piece that is all that crosses a cut: every value that enters it, leaves it or is written by it keeps its shape
and dtype, or the regions on the other side of the cut would read what is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecework.seam.fx import format_call
from piecework.seam.kinds import written_placeholders
from piecework.seam.names import name_of
from piecework.values.graph import TracedGraph


@dataclass(frozen=True)
class Contract:
    """What a graph's surroundings rely on: results and written inputs, each by its name and as text.

    `sources` says which results are an input itself, or an earlier result.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    written: frozenset[str]


def contract_of(traced: TracedGraph) -> Contract:
    """Read the contract of a whole graph: results with strides, since the caller gets them as they are."""
    graph = traced.graph
    results = graph.output_node().args[0]
    assert isinstance(results, list | tuple)
    given = [n for n in graph.find_nodes(op="placeholder") if not traced.bindings[n.name].is_static]
    return Contract(
        tuple(_spec(each) for each in results),
        tuple(_sources(results)),
        tuple((node.name, _spec(node)) for node in given),
        frozenset(node.name for node in written_placeholders(graph)),
    )


def _sources(results: Sequence[Any]) -> Iterator[str]:
    """Tell for each result which input, or earlier result, it is itself: the caller tells that from a copy.

    Views are not followed: a traced value may be told to lie apart from what it is a view of.
    """
    seen: dict[Any, str] = {}
    for index, each in enumerate(results):
        is_input = isinstance(each, fx.Node) and each.op == "placeholder"
        yield f"`{each.name}`" if is_input else seen.get(each, "a value of its own")
        if isinstance(each, fx.Node):
            seen.setdefault(each, f"result {index}")


def fault_of(before: Contract, traced: TracedGraph) -> str:
    """Say what is wrong with a whole graph after a pass, or nothing."""
    fault = _fault_of_nodes(traced)
    if fault:
        return fault
    after = contract_of(traced)
    if len(before.results) != len(after.results):
        return f"the graph has {len(after.results)} results, it had {len(before.results)}"
    for index, (old, new) in enumerate(zip(before.results, after.results, strict=True)):
        if old != new:
            return f"result {index} is `{new}`, it was `{old}`"
    for index, (own, other) in enumerate(zip(before.sources, after.sources, strict=True)):
        if own != other:
            return f"result {index} is {other}, it was {own}"
    known = dict(before.inputs)
    for name, spec in after.inputs:
        if known.get(name) != spec:
            return f"input `{name}` is `{spec}`, it was `{known.get(name, 'not there')}`"
    if before.written != after.written:
        differs = sorted(before.written ^ after.written)[0]
        return f"input `{differs}` is {'no longer ' if differs in before.written else ''}written in place"
    return ""


def fault_of_form(graph: fx.Graph) -> str:
    """Say why nothing more can be asked of a graph, or nothing: it ends in one list of results, and holds together."""
    outputs = graph.find_nodes(op="output")
    last = next(iter(reversed(graph.nodes)), None)
    if last is None or list(outputs) != [last]:
        return f"it has {len(outputs)} outputs, where one is due, as the last node"
    results = last.args[0]
    if not isinstance(results, list | tuple):
        return f"its output is `{results}`, and no list of results"
    try:
        graph.lint()
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"the graph is not well formed: {str(error).splitlines()[0]}"
    return ""


def _fault_of_nodes(traced: TracedGraph) -> str:
    """Say what makes a graph unusable by the stages after it."""
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.name not in traced.bindings:
            return f"input `{node.name}` has no binding: a pass that adds a weight says how it is made"
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            return f"node `{node.name}` is a `{node.op}`, which no piece can hold"
        if node.op == "call_function":
            try:
                name_of(node.target)
            except Exception as error:  # noqa: BLE001  whatever a target is, it is named or it is a fault
                return f"node `{node.name}` calls what has no importable name: {error}"
    return ""


def _spec(node: Any) -> str:
    return str(node.meta.get("spec")) if isinstance(node, fx.Node) else repr(node)


# ------------------------------------------------------------------------------------------------------ on a piece


def crossing_values(graph: fx.Graph) -> dict[str, str]:
    """Return what crosses the cuts around a functional piece: its inputs and results with shape and dtype."""
    found = {f"input {index}": _shape(node) for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    results = graph.output_node().args[0]
    assert isinstance(results, list | tuple)
    return found | {f"result {index}": _shape(node) for index, node in enumerate(results)}


def fault_of_piece(before: dict[str, str], graph: fx.Graph) -> str:
    """Say which value that crosses a cut is another than before, or nothing."""
    after = crossing_values(graph)
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            return f"{name} is `{after.get(name, 'gone')}`, it was `{before.get(name, 'not there')}`"
    return ""


def _shape(node: Any) -> str:
    if not isinstance(node, fx.Node):
        return repr(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"


def lines_of(graph: fx.Graph) -> tuple[str, ...]:
    """Write a graph line by line: its inputs, its calls with what they give, its results."""
    names = {node: node.name for node in graph.nodes}
    lines = [f"{node.name}: {_note(node)}" for node in graph.find_nodes(op="placeholder")]
    lines += [
        f"{node.name} = {_call(node, names)}    # {_note(node)}" for node in graph.nodes if node.op.startswith("call")
    ]
    return (*lines, *(f"return {node.args[0]}" for node in graph.find_nodes(op="output")))


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    try:
        return format_call(node, names)
    except Exception:  # noqa: BLE001  a broken graph is shown as it is
        return f"{node.target}{node.args}"


def _note(node: fx.Node) -> str:
    spec = node.meta.get("spec")
    return str(spec) if spec is not None else _shape(node) if "val" in node.meta else ""


def shorten(lines: Sequence[str], most: int = 40) -> str:
    """Join lines, and leave out what lies beyond the first `most`."""
    rest = len(lines) - most
    return "\n".join([*lines[:most], *([f"… and {rest} lines more"] if rest > 0 else [])])
