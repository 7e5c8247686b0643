"""Gated activations: one half of a feed-forward block's input bends the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.errors import OptionError
from piecework.ops.operators import define


def silu_and_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply `up` by the SiLU of `gate`.

    Tensors:
        gate, up  [..., F]  model  may be halves of one tensor
        ->        [..., F]  model
    """
    return F.silu(gate) * up


def gelu_and_mul_reference(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """Multiply `up` by the GELU of `gate`.

    Tensors:
        gate, up  [..., F]  model  may be halves of one tensor
        ->        [..., F]  model
    """
    return F.gelu(gate, approximate=approximate) * up


define("silu_and_mul", {"silu_and_mul(Tensor gate, Tensor up) -> Tensor": silu_and_mul_reference})
define("gelu_and_mul", {"gelu_and_mul(Tensor gate, Tensor up, str approximate) -> Tensor": gelu_and_mul_reference})


def silu_and_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Multiply `up` by the SiLU of `gate`; a tensor alone is taken for both, gate first.

    Tensors:
        gate, up  [..., F]  model  gate is [..., 2*F] where it is given alone
        ->        [..., F]  model
    """
    first, second = _halves(gate) if up is None else (gate, up)
    product: Tensor = torch.ops.piecework.silu_and_mul(first, second)
    return product


def gelu_and_mul(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """Multiply `up` by the GELU of `gate`; a tensor alone is taken for both, gate first.

    Tensors:
        gate, up  [..., F]  model  gate is [..., 2*F] where it is given alone
        ->        [..., F]  model

    `approximate` is `none` or `tanh`, as torch has it.
    """
    if approximate not in ("none", "tanh"):
        raise OptionError(f"`approximate` is `{approximate}`", hint="use `none` or `tanh`")
    first, second = _halves(gate) if up is None else (gate, up)
    product: Tensor = torch.ops.piecework.gelu_and_mul(first, second, approximate)
    return product


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    width = both.shape[-1]
    if width % 2:
        raise OptionError(f"rows of {width} have no two halves", hint="give `gate` and `up` as two tensors")
    return both[..., : width // 2], both[..., width // 2 :]
