"""Norms by the root of the mean square, alone and with the residual's addition, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.errors import OptionError
from piecework.ops.library import register
from piecework.ops.operators import define


def rms_norm_reference(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Divide each row by the root of its mean square, in float32, and weigh it in the weight's dtype.

    Tensors:
        x       [..., E]  model
        weight  [E]       any    float32 weights round once, at the end
        ->      [..., E]  model
    """
    orig_dtype = x.dtype
    x = x.to(torch.float32)
    x_var = x if variance_size is None else x[..., :variance_size]
    variance = x_var.pow(2).mean(dim=-1, keepdim=True)
    x = x * torch.rsqrt(variance + epsilon)
    if weight is not None:
        x = x.to(weight.dtype) * weight
    return x.to(orig_dtype)


def fused_add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual in float32, norm the unrounded sum, and return both.

    Tensors:
        x, residual  [..., E]            model
        weight       [E]                 any
        ->           [..., E], [..., E]  model  normed, and the sum that is the next residual
    """
    orig_dtype = x.dtype
    x = x.to(torch.float32)
    x = x + residual.to(torch.float32)
    residual = x.to(orig_dtype)
    x_var = x if variance_size is None else x[..., :variance_size]
    variance = x_var.pow(2).mean(dim=-1, keepdim=True)
    x = x * torch.rsqrt(variance + epsilon)
    if weight is not None:
        x = x.to(weight.dtype) * weight
    return x.to(orig_dtype), residual


_TAIL = "Tensor? weight, float epsilon, int? variance_size=None"
define("rms_norm", {f"rms_norm(Tensor x, {_TAIL}) -> Tensor": rms_norm_reference})
define(
    "fused_add_rms_norm",
    {f"fused_add_rms_norm(Tensor x, Tensor residual, {_TAIL}) -> (Tensor, Tensor)": fused_add_rms_norm_reference},
)


def _add_norm_in_place(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> None:
    normed, total = torch.ops.piecework.fused_add_rms_norm(x, residual, weight, epsilon, variance_size)
    x.copy_(normed)
    residual.copy_(total)


def _add_norm_in_place_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> None:
    return None


register(
    f"fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, {_TAIL}) -> ()",
    _add_norm_in_place,
    _add_norm_in_place_fake,
)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Divide each row by the root of its mean square and weigh it; one node of a graph.

    Tensors:
        x       [..., E]  model
        weight  [E]       any    None for a norm without weight
        ->      [..., E]  model

    The mean is taken over the first `variance_size` elements of a row, or over all.
    """
    _check(x, variance_size)
    normed: Tensor = torch.ops.piecework.rms_norm(x, weight, epsilon, variance_size)
    return normed


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add the residual and norm the sum; return the normed rows and the sum.

    Tensors:
        x, residual  [..., E]            model  MUTATED where `inplace`: they then hold the results
        weight       [E]                 any    None for a norm without weight
        ->           [..., E], [..., E]  model

    Raises OptionError where `variance_size` is none, or where results cannot stand in place of the arguments.
    """
    _check(x, variance_size)
    if not inplace:
        normed, total = torch.ops.piecework.fused_add_rms_norm(x, residual, weight, epsilon, variance_size)
        return normed, total
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise OptionError(
            f"`fused_add_rms_norm` cannot write in place: `x` is {list(x.shape)} `{x.dtype}`, `residual` "
            f"{list(residual.shape)} `{residual.dtype}`",
            hint="leave `inplace` out, or give both one shape and dtype",
        )
    torch.ops.piecework.fused_add_rms_norm_(x, residual, weight, epsilon, variance_size)
    return x, residual


def _check(x: Tensor, variance_size: int | None) -> None:
    if variance_size is not None and not 0 < variance_size <= x.shape[-1]:
        raise OptionError(
            f"`variance_size` is `{variance_size}` for rows of {x.shape[-1]}",
            hint="it counts the first elements of a row whose mean square is taken",
        )
