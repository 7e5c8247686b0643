"""What forward returns and does nothing else with: weights, buffers and plain tensors that no graph reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework.seam.dynamo import Capture
from piecework.seam.input_names import held_tensors
from piecework.values.graph import Binding
from piecework.values.tree import Tree, tree_leaves


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that a model holds, and what it is there."""

    tensor: torch.Tensor
    binding: Binding


def unread(model: torch.nn.Module, read: Sequence[Any]) -> dict[int, Held]:
    """Return the tensors of a model that are no input of the graph, by identity."""
    known = {id(value) for value in read}
    return {id(t): Held(t, binding) for t, binding in held_tensors(model) if id(t) not in known}


def take_in(
    captured: Capture, named: Sequence[Binding | None], held: Mapping[int, Held], result: Tree
) -> list[Binding | None]:
    """Make graph inputs of the unread tensors that the result holds; return what every input is now.

    The graph runs no more in Dynamo's hands after this: Dynamo knows of no such input.
    """
    wanted = {leaf["static"] for leaf in tree_leaves(result) if "static" in leaf}
    found = [one for one in held.values() if one.binding.name in wanted]
    graph = captured.graph.graph
    places = graph.find_nodes(op="placeholder")
    with graph.inserting_after(places[-1]) if places else graph.inserting_before(next(iter(graph.nodes))):
        made = [graph.placeholder(f"returned_{index}") for index in reversed(range(len(found)))]
    for node, one in zip(reversed(made), found, strict=True):
        node.meta["example_value"] = _as_traced(one.tensor, graph)
    captured.inputs += [one.tensor for one in found]
    captured.sources = [*captured.sources, *("" for _ in found)]
    return [*named, *(one.binding for one in found)]


def _as_traced(tensor: torch.Tensor, graph: torch.fx.Graph) -> Any:
    """Return the stand-in that the tracer would have made of a tensor."""
    modes = (getattr(node.meta.get("example_value"), "fake_mode", None) for node in graph.nodes)
    mode = next((mode for mode in modes if mode is not None), None)
    return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
