"""Write what a Python function computes into a traced graph, in place of one call.

The function runs on stand-ins for the call's arguments: each operation that it asks for becomes a node. What it asks
of a tensor's dtype and shape is answered from the traced value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from piecework.seam.propagate import as_traced


class _StandIn(fx.Proxy):
    """A node as a tensor that knows its dtype and shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Tell the traced value's dtype."""
        found: torch.dtype = self.node.meta["example_value"].dtype
        return found

    @property
    def shape(self) -> torch.Size:
        """Tell the traced value's shape."""
        found: torch.Size = self.node.meta["example_value"].shape
        return found


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Makes nodes, and computes what each gives."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.made: list[fx.Node] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the stand-in of a node."""
        return _StandIn(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Make a node with its value."""
        node = super().create_node(*args, **kwargs)
        node.meta["example_value"] = _value_of(node)
        self.made.append(node)
        return node


def _value_of(node: fx.Node) -> Any:
    def value(inner: fx.Node) -> Any:
        return inner.meta.get("example_value")

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def inline_call(node: fx.Node, function: Callable[..., Any]) -> tuple[Any, list[fx.Node]]:
    """Insert what the function computes for a call's arguments before it; return the results' nodes, and all new ones.

    New nodes hold values, which the next call to be written out may ask for, and no specs: whoever writes calls out
    forgets the values at its end (`forget_values`), so that they are computed with all others that a pass makes.
    """
    tracer = _Tracer(node.graph)

    def stand_in(inner: fx.Node) -> Any:
        return tracer.proxy(inner)

    args, kwargs = fx.map_arg(node.args, stand_in), fx.map_arg(node.kwargs, stand_in)
    with node.graph.inserting_before(node), as_traced(node.graph):
        results = function(*args, **kwargs)
    found = tuple(each.node for each in results) if isinstance(results, tuple) else results.node
    return found, tracer.made


def forget_values(nodes: Iterable[fx.Node]) -> None:
    """Let the values of nodes be computed anew."""
    for node in nodes:
        node.meta.pop("example_value", None)
        node.meta.pop("spec", None)
