"""Give the nodes that a pass made, and those that it changed, the values that a trace gives: fake tensors and specs.

Only what is new or reads something that changed is computed, so that a pass costs what it changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from piecework.seam.kinds import is_state, storage_of
from piecework.values.graph import Binding
from piecework.values.signature import ScalarSpec, TensorSpec

if TYPE_CHECKING:
    from piecework.seam.symbols import SymbolTable

_MISSING = object()


def fake_mode_of(graph: fx.Graph) -> Any:
    """Return the mode under which the graph's values live; None where it has no tensor."""
    return next((v.fake_mode for n in graph.nodes if hasattr(v := n.meta.get("example_value"), "fake_mode")), None)


@contextmanager
def as_traced(graph: fx.Graph) -> Iterator[None]:
    """Compute on the graph's own fake values inside the block, without gradients."""
    from torch.fx.experimental import _config

    mode = fake_mode_of(graph)
    # As in a trace: no size is taken for 1 or for other than 1 by torch itself.
    with torch.no_grad(), _config.patch(backed_size_oblivious=True), mode or nullcontext():  # type: ignore[attr-defined]
        yield


def count_conditions(graph: fx.Graph) -> int:
    """Return how many conditions on sizes the graph's values rely on so far."""
    mode = fake_mode_of(graph)
    return len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0


def refresh_values(
    graph: fx.Graph, bindings: Mapping[str, Binding], known: int, edited: Collection[fx.Node] = ()
) -> list[str]:
    """Compute what new and `edited` nodes give; return the conditions on sizes beyond the first `known`, as text.

    A node keeps its value where what is computed anew has the same spec and shares no memory with what changed.
    """
    mode = fake_mode_of(graph)
    if mode is None:
        return []
    shape_env = mode.shape_env
    sizes = _sizes_by_name(graph, shape_env)
    table = _table(graph, sizes)
    changed: set[fx.Node] = set()
    numbers: dict[fx.Node, Any] = {
        node: sizes.get(bindings[node.name].name)
        for node in graph.find_nodes(op="placeholder")
        if node.name in bindings and bindings[node.name].kind == "symbol"
    }
    with as_traced(graph), _modes_closed(numbers):
        for node in graph.nodes:
            if node.op.startswith("call"):
                _refresh(node, changed, numbers, table, node in edited)
    guards = shape_env.guards[known:] if shape_env is not None else []
    return [str(table.text(guard.expr)) for guard in guards]


@contextmanager
def _modes_closed(values: Mapping[fx.Node, Any]) -> Iterator[None]:
    """Close what is open at the end of the block: a node that failed stood inside a span of autocast."""
    try:
        yield
    finally:
        opened = [node for node in values if _function(node) == "_enter_autocast"]
        closed = {node.args[0] for node in values if _function(node) == "_exit_autocast"}
        for node in reversed(opened):
            if node not in closed:
                values[node].__exit__(None, None, None)


def _function(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _refresh(
    node: fx.Node, changed: set[fx.Node], numbers: dict[fx.Node, Any], table: SymbolTable, is_edited: bool
) -> None:
    if node.meta.get("number"):
        numbers[node] = _run(node, numbers)
        return
    old = node.meta.get("example_value", _MISSING)
    is_known = old is not _MISSING and not is_edited and changed.isdisjoint(node.all_input_nodes)
    if is_state(node):
        numbers[node] = _run(node, numbers)  # the nodes up to its end are computed as they were traced
        return
    if is_known or "defines" in node.meta or node.meta.get("unbacked_bindings"):
        return
    new = _run(node, numbers)
    spec = table.spec(new) if new is not None else ScalarSpec("int")
    same = old is not _MISSING and spec == node.meta.get("spec")
    if same and not _shares(new, node, changed) and not (is_edited and _memory(new) != _memory(old)):
        return
    node.meta["example_value"] = new
    if new is not None:
        node.meta["spec"] = spec
    changed.add(node)


def _run(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> Any:
    def value(inner: fx.Node) -> Any:
        return numbers[inner] if inner in numbers else inner.meta.get("example_value")

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _shares(new: Any, node: fx.Node, changed: set[fx.Node]) -> bool:
    """Tell whether a value lies in the memory of an input that was replaced: its views must name the new one."""
    own = _memory(new)
    return any(storage_of(v.meta.get("example_value")) in own for v in node.all_input_nodes if v in changed)


def _memory(value: Any) -> set[int]:
    return {storage_of(item) for item in (value if isinstance(value, tuple | list) else (value,))} - {0}


def _sizes_by_name(graph: fx.Graph, shape_env: Any) -> dict[str, Any]:
    """Return the symbolic size of each declared name and data-dependent one, read off the traced tensors.

    A size of an input that the graph reads nothing else of is that of no tensor: its symbol stands at the placeholder.
    """
    found: dict[str, Any] = {}
    for node in graph.nodes:
        value, spec = node.meta.get("example_value"), node.meta.get("spec")
        if isinstance(value, torch.Tensor) and isinstance(spec, TensorSpec):
            for size, text in zip(value.shape, spec.shape, strict=True):
                if isinstance(text, str) and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found.setdefault(text, size)
    for node in graph.find_nodes(op="placeholder"):
        name, symbol = node.meta.get("symbol", ("", None))
        if name and name not in found and shape_env is not None:
            found[name] = shape_env.create_symintnode(symbol, hint=None)
    return found


def _table(graph: fx.Graph, sizes: Mapping[str, Any]) -> SymbolTable:
    from piecework.seam.symbols import SymbolTable  # it brings sympy, which a warm start does without

    names = {size.node.expr: name for name, size in sizes.items()}
    for node in graph.nodes:
        value, spec = node.meta.get("example_value"), node.meta.get("spec")
        if isinstance(value, torch.Tensor) and isinstance(spec, TensorSpec):
            # Inputs of one declared size have a symbol each, as long as nothing in the model relates them.
            pairs = zip(value.shape, spec.shape, strict=True)
            for size, text in pairs:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and text in sizes:
                    names.setdefault(size.node.expr, str(text))
        if "defines" in node.meta and isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            names.setdefault(value.node.expr, str(node.meta["defines"]))
    return SymbolTable(names)


def refresh_vals(graph: fx.Graph, edited: Collection[fx.Node] = ()) -> None:
    """Compute what new and `edited` nodes of a functional ATen graph give, under `meta["val"]`."""
    mode = next((v.fake_mode for n in graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode")), None)
    if mode is None:
        return
    changed: set[fx.Node] = set()
    with torch.no_grad(), mode:
        for node in graph.nodes:
            if not node.op.startswith("call") or node.meta.get("unbacked_bindings"):
                continue
            if "val" not in node.meta or node in edited or not changed.isdisjoint(node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda inner: inner.meta.get("val"))
                node.meta["val"] = node.target(*args, **kwargs)
                changed.add(node)
