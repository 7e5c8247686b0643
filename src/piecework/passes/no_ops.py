"""No-op elimination: calls that give the very tensor they were given, or the same view of it, are left out.

Only what is exact is taken: torch itself returns its argument, or a view of all of it in the same order. A copy is
none of them, nor is a product with one: who writes to the result would write to the argument.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from piecework.passes.declare import graph_pass
from piecework.values.graph import TracedGraph
from piecework.values.rewriting import Rewritten
from piecework.values.signature import TensorSpec

# Give their argument itself where it is of the dtype, device and layout asked for already.
_CASTS = {"to", "type_as", "float", "half", "bfloat16", "double", "contiguous", "cpu", "cuda", "type"}
# Give a view; where shape and strides are the argument's it is a view of all of it.
_VIEWS = {"view", "reshape", "expand", "expand_as", "view_as", "squeeze", "flatten", "narrow", "reshape_as", "permute"}
_RESHAPED_IN_PLACE = {"resize_", "unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "set_"}
_DROPOUTS = {torch.nn.functional.dropout, torch.dropout}


@graph_pass("no_ops", version=1)
def no_ops(traced: TracedGraph) -> Rewritten:
    """Replace each call that does nothing by its argument."""
    matches: list[str] = []
    for node in list(traced.graph.nodes):
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or not _does_nothing(node, source) or _must_stay(node, source):
            continue
        matches.append(f"{node.name} = {_name(node)}({source.name})")
        node.replace_all_uses_with(source)
        traced.graph.erase_node(node)
    return Rewritten(traced, tuple(matches))


def _does_nothing(node: fx.Node, source: fx.Node) -> bool:
    spec, given = node.meta.get("spec"), source.meta.get("spec")
    if not isinstance(spec, TensorSpec) or spec != given or node.meta.get("number"):
        return False
    name = _name(node)
    if node.op == "call_function" and node.target in _DROPOUTS:
        return _dropout_is_off(node)
    if name in _CASTS or (node.op == "call_function" and node.target is torch.Tensor.to):
        return not _copies(node)
    if name in _VIEWS:
        return True
    return node.target is operator.getitem and _takes_all(node.args[1])


def _must_stay(node: fx.Node, source: fx.Node) -> bool:
    """Tell whether a node is a result that the caller tells from another, or is given another shape in place."""
    return any(user.op == "output" or _name(user) in _RESHAPED_IN_PLACE for user in node.users) or any(
        _name(user) in _RESHAPED_IN_PLACE for user in source.users
    )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def _copies(node: fx.Node) -> bool:
    """Tell whether a cast was asked for a copy of its own, or reads another tensor's values."""
    flags = [value for value in (*node.args[1:], *node.kwargs.values()) if isinstance(value, bool)]
    return bool(node.kwargs.get("copy")) or (len(flags) > 1 and flags[-1])


def _dropout_is_off(node: fx.Node) -> bool:
    """Tell whether dropout is a function of its argument alone that gives it back, and was not asked to write it."""
    words: dict[str, Any] = dict(zip(("p", "training", "inplace"), node.args[1:], strict=False)) | dict(node.kwargs)
    is_training = words.get("training", words.get("train", True))
    return is_training is False or words.get("p") == 0.0


def _takes_all(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(item is ... or (isinstance(item, slice) and item == slice(None, None, None)) for item in items)
