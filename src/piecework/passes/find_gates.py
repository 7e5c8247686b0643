"""Find gated activations: the activation of one tensor times another of the same shape and dtype.

Where the activation has another reader, or where the product broadcasts or promotes, nothing is taken.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from piecework.passes.found import Found
from piecework.passes.reading import Miss, argument, called, only_user, pair, spec_of


def find_gate(node: fx.Node) -> Found | None:
    """Find a product with a SiLU or a GELU whose activation is this node."""
    name = called(node)
    if name not in ("silu", "gelu") or spec_of(node) is None or argument(node, 1, "inplace") is True:
        return None
    gate = node.args[0]
    if len(node.users) == 1 and called(next(iter(node.users))) != "mul":
        return None
    product = only_user(node)
    first, second = pair(product)
    up = second if first is node else first
    _require_alike(gate, up)
    tail = () if name == "silu" else (argument(node, 1, "approximate", "none"),)
    return Found(product, f"{name}_and_mul", (gate, up, *tail), (node,))


def _require_alike(gate: Any, up: Any) -> None:
    one, other = spec_of(gate), spec_of(up)
    if one is None or other is None or gate is up:
        raise Miss("the activation is multiplied by what is no tensor of its own")
    if one.shape != other.shape:
        raise Miss(f"`{up.name}` is {list(other.shape)} where the gate is {list(one.shape)}")
    if one.dtype != other.dtype:
        raise Miss(f"`{up.name}` is `{other.dtype}` where the gate is `{one.dtype}`")
