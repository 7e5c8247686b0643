"""The structure of what forward returns: each leaf is a graph output, an input, a weight, or a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from piecework.errors import TraceError
from piecework.seam.dynamo import Capture, OutputInt
from piecework.seam.kinds import mutated_arguments
from piecework.seam.lines import at
from piecework.seam.returned import Held
from piecework.values.graph import Binding
from piecework.values.tree import Tree, describe, leaves, map_tree, tree_leaves

Inputs = Sequence[tuple[str, Any]]


def describe_result(
    captured: Capture,
    result: Any,
    inputs: Inputs,
    named: Sequence[Binding | None],
    other_arguments: Callable[[], Mapping[str, Any]],
    sizes: Mapping[str, tuple[int, int]],
    held: Mapping[int, Held],
) -> Tree:
    """Match each leaf of the result with the graph output, input or constant that it is, or one of those `held`.

    A leaf that is none of these is a Python value; it must come out equal at other sizes, which a second
    run on `other_arguments()` shows, or it would silently stay what it was at the trace. One that comes out both times
    as a size that varies is that size: `sizes` holds those of both runs by name.
    """
    static = _static_names(captured, named, held)
    tree = describe(result, _leaf_matcher(captured, inputs, static))
    claimed = {leaf["output"] for leaf in tree_leaves(tree) if "output" in leaf}
    unclaimed = set(range(len(captured.results))) - claimed - _in_place(captured)
    if any(leaf["kind"] == "constant" and leaf["value"] is not None for leaf in tree_leaves(tree)):
        tree = _with_sizes(captured, tree, static, other_arguments(), sizes)
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


def _with_sizes(
    captured: Capture,
    tree: Tree,
    static: Mapping[int, str],
    other: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, int]],
) -> Tree:
    """Return the tree with the sizes in it by name, as in `return y, x.shape`."""
    again = [(path, leaf) for name, value in other.items() for path, leaf in leaves(value, name)]
    second = tree_leaves(describe(captured.run((), other), _leaf_matcher(captured, again, static)))

    line = _first_line(captured)

    def settle(one: Tree) -> Tree:
        two = next(second)
        value = one.get("value")
        found = [name for name, both in sizes.items() if type(value) is int and both == (value, two.get("value"))]
        if len(found) == 1 and one != two:
            return {"kind": "value", "symbol": found[0]}
        if found:
            raise TraceError(
                f"the result of forward{at(line)} holds the number `{value}`, "
                f"which is the size `{found[0]}` or only equal to it",
                hint="compile with an example of another size, or return a tensor",
                facts={"file": line[0], "line": line[1]},
            )
        if one == two:
            return one
        raise TraceError(
            f"the result of forward{at(line)} holds a Python number that depends on a size: "
            f"`{value!r}`, then `{two.get('value')!r}`",
            hint="return a tensor, or the size itself",
            facts={"file": line[0], "line": line[1]},
        )

    return map_tree(settle, tree)


def _first_line(captured: Capture) -> tuple[str, int]:
    """Return where the first function begins that a trace read and that is not torch's or ours: the model's forward."""
    skipped = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    own = (code for code in captured.code if not code.co_filename.startswith(skipped))
    return next(((code.co_filename, code.co_firstlineno) for code in own), ("", 0))


def _static_names(
    captured: Capture, named: Sequence[Binding | None], held: Mapping[int, Held]
) -> dict[int, str]:
    """Return the names of the tensors that the graph reads and of the others that the model holds, by identity."""
    read = {id(v): b.name for v, b in zip(captured.inputs, named, strict=True) if b and b.is_static}
    return {**{key: one.binding.name for key, one in held.items()}, **read}


def _leaf_matcher(captured: Capture, inputs: Inputs, static: Mapping[int, str]) -> Callable[[str, Any], Tree]:
    outputs = {id(value): index for index, value in enumerate(captured.results) if isinstance(value, torch.Tensor)}
    paths = {id(leaf): path for path, leaf in inputs if isinstance(leaf, torch.Tensor)}

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
