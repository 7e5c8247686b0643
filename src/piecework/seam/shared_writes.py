"""Memory that two inputs of a graph share: a compiler takes each for memory of its own, which a write makes untrue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecework.errors import TraceError
from piecework.seam.kinds import mutated_arguments, storage_of, written_placeholders
from piecework.seam.lines import at, line_of
from piecework.values.graph import Binding
from piecework.values.overlap import shared_with_written
from piecework.values.sources import readable_source


def refuse_shared_writes(
    graph: fx.Graph, values: Sequence[Any], named: Sequence[Binding | None], unowned: Mapping[int, str]
) -> None:
    """Raise where a graph writes to an input that shares an element with another input.

    `values` are the inputs themselves, `named` says what each is, `unowned` where those of no module are read. What has
    no memory yet is looked at when the program is bound.
    """
    from torch._subclasses import FakeTensor

    placeholders = graph.find_nodes(op="placeholder")
    tensors: dict[str, torch.Tensor] = {}
    nodes: dict[str, fx.Node] = {}
    for index, (node, value, binding) in enumerate(zip(placeholders, values, named, strict=True)):
        if binding is not None and not isinstance(value, FakeTensor):
            name = f"the {binding.kind} `{binding.name}`"
            if binding.kind == "input":
                name = f"argument `{binding.name}`"
            elif index in unowned:
                name = f"the tensor `{readable_source(unowned[index])}`"
            tensors[name], nodes[name] = value, node
    written = set(written_placeholders(graph))
    found = shared_with_written({name: tensors[name] for name, node in nodes.items() if node in written}, tensors)
    if found is None:
        return
    one, two = found
    hint = "pass a copy" if "argument" in f"{one} {two}" else "keep one of them, and take the view of it inside forward"
    raise TraceError(
        f"{one} and {two} share memory, and forward writes to {one.removeprefix('the ')}{_where(graph, nodes[one])}",
        hint=hint,
        facts={"written": one, "shared": two},
    )


def _where(graph: fx.Graph, written: fx.Node) -> str:
    memory = storage_of(written.meta.get("example_value"))
    for node in graph.nodes:
        for argument in mutated_arguments(node):
            if argument is written or memory == storage_of(argument.meta.get("example_value")):
                return at(line_of(node))
    return ""
