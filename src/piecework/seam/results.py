"""The structure of what forward returns: each leaf is a graph output, an input, a weight, or a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecework.errors import TraceError
from piecework.seam.dynamo import Capture, OutputInt
from piecework.seam.kinds import mutated_arguments
from piecework.values.graph import Binding
from piecework.values.tree import Tree, describe, leaves, tree_leaves

Inputs = Sequence[tuple[str, Any]]


def describe_result(
    captured: Capture,
    result: Any,
    inputs: Inputs,
    named: Sequence[Binding | None],
    other_arguments: Callable[[], Mapping[str, Any]],
) -> Tree:
    """Match each leaf of the result with the graph output, input or constant that it is.

    A leaf that is none of these is a Python value; it must come out equal at other sizes, which a second
    run on `other_arguments()` shows, or it would silently stay what it was at the trace.
    """
    tree = describe(result, _leaf_matcher(captured, inputs, named))
    claimed = {leaf["output"] for leaf in tree_leaves(tree) if "output" in leaf}
    unclaimed = set(range(len(captured.results))) - claimed - _in_place(captured)
    if any(leaf["kind"] == "constant" and leaf["value"] is not None for leaf in tree_leaves(tree)):
        _check_constants(captured, tree, named, other_arguments())
    if unclaimed:
        raise TraceError(
            f"the graph computes `{len(unclaimed)}` value(s) that the result does not hold",
            hint="forward stores a tensor somewhere, or turns one into a Python number: return the tensor instead",
        )
    return tree


def _in_place(captured: Capture) -> set[int]:
    """Return the outputs that are a module's tensor, written in place: `self.seen += x` gives it back to the module."""
    outputs = next(node for node in captured.graph.graph.nodes if node.op == "output").args[0]
    return {index for index, node in enumerate(outputs) if captured.writes.in_place and mutated_arguments(node)}


def _check_constants(captured: Capture, tree: Tree, named: Sequence[Binding | None], other: Mapping[str, Any]) -> None:
    again = [(path, leaf) for name, value in other.items() for path, leaf in leaves(value, name)]
    second = describe(captured.run((), other), _leaf_matcher(captured, again, named))
    for one, two in zip(tree_leaves(tree), tree_leaves(second), strict=True):
        if one != two:
            raise TraceError(
                "the result holds a Python number that depends on a size: "
                f"`{one.get('value')!r}`, then `{two.get('value')!r}`",
                hint="return a tensor, or the size itself",
            )


def _leaf_matcher(captured: Capture, inputs: Inputs, named: Sequence[Binding | None]) -> Callable[[str, Any], Tree]:
    outputs = {id(value): index for index, value in enumerate(captured.results) if isinstance(value, torch.Tensor)}
    paths = {id(leaf): path for path, leaf in inputs if isinstance(leaf, torch.Tensor)}
    static = {id(v): b.name for v, b in zip(captured.inputs, named, strict=True) if b and b.is_static}

    def match(path: str, leaf: Any) -> Tree:
        if isinstance(leaf, OutputInt):
            return {"kind": "value", "output": leaf.position}
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in outputs:
                return {"kind": "value", "output": outputs[id(leaf)]}
            if id(leaf) in paths:
                return {"kind": "value", "input": paths[id(leaf)]}
            if id(leaf) in static:
                return {"kind": "value", "static": static[id(leaf)]}
            raise TraceError(
                f"`{path}` is a tensor that neither the graph nor the caller made",
                hint="register it as a buffer, or compute it in forward",
            )
        if leaf is None or isinstance(leaf, int | float | str | bool):
            return {"kind": "constant", "value": leaf}
        raise TraceError(
            f"`{path}` is a `{type(leaf).__name__}`, which a program cannot return",
            hint="return tensors, numbers, strings, and tuples, lists, dictionaries or dataclasses of them",
        )

    return match
