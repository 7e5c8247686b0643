"""Quantisation to 8-bit floats: by a given scale, or by one that the values ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.errors import OptionError
from piecework.ops.operators import define, implement

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest finite number of the OCP format E4M3
LEAST = 1e-12  # a row of zeros is divided by something


def quant_fp8_static_reference(x: Tensor, scale: Tensor) -> Tensor:
    """Divide by a given scale and round to 8 bits; what is too large becomes the largest.

    Tensors:
        x      [..., E]  model
        scale  [...]     f32    one number, or what is broadcast over `x`
        ->     [..., E]  any    float8_e4m3fn
    """
    return (x.to(torch.float32) / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quant_fp8_dynamic_reference(x: Tensor, per_token: bool, group_size: int) -> tuple[Tensor, Tensor]:
    """Find the scale at which the largest value fits, and round to 8 bits.

    Tensors:
        x   [..., E]              model
        ->  [..., E], [..., N]    any    float8_e4m3fn; scales in float32: one, [..., 1] per token, or one a group
    """
    precise = x.to(torch.float32)
    if group_size:
        precise = precise.unflatten(-1, (-1, group_size))
    largest = precise.abs().amax(dim=-1, keepdim=True) if per_token or group_size else precise.abs().amax()
    scale = largest.clamp(min=LEAST) / FP8_MAX
    quantised = (precise / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    if group_size:
        quantised, scale = quantised.flatten(-2), scale.squeeze(-1)
    return quantised, scale


define(
    "quant_fp8",
    {
        "quant_fp8_static(Tensor x, Tensor scale) -> Tensor": quant_fp8_static_reference,
        "quant_fp8_dynamic(Tensor x, bool per_token, int group_size) -> (Tensor, Tensor)": quant_fp8_dynamic_reference,
    },
)


def quant_fp8_by_columns(x: Tensor, per_token: bool, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantise by groups, with the scales of one group of all rows side by side.

    Tensors:
        x   [..., E]            model
        ->  [..., E], [..., N]  any    the scales' last dimension but one has stride 1
    """
    quantised, scale = quant_fp8_dynamic_reference(x, per_token, group_size)
    if x.dim() > 1:
        scale = scale.transpose(-1, -2).contiguous().transpose(-1, -2)
    return quantised.contiguous(), scale


def _by_columns_fake(x: Tensor, per_token: bool, group_size: int) -> tuple[Tensor, Tensor]:
    count = x.shape[-1] // group_size
    shape = (count,) if x.dim() == 1 else (*x.shape[:-2], count, x.shape[-2])
    scale = x.new_empty(shape, dtype=torch.float32)
    quantised = torch.empty(x.shape, dtype=FP8, device=x.device)
    return quantised, scale if x.dim() == 1 else scale.transpose(-1, -2)


implement(
    "quant_fp8",
    "columns",
    {"quant_fp8_dynamic": quant_fp8_by_columns},
    irreplaceable="a product with block-quantised weights reads the scales column by column, and how a value lies "
    "inside a piece is the compiler's to choose",
    serves=lambda arguments: bool(arguments.get("group_size")),
    sources=(quant_fp8_dynamic_reference,),
    fakes={"quant_fp8_dynamic": _by_columns_fake},
)


def quant_fp8(
    x: Tensor, scale: Tensor | None = None, *, per_token: bool = False, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantise to float8_e4m3fn: by a given scale (static), one scale for all (dynamic), one a row, or one a group.

    Tensors:
        x      [..., E]            model
        scale  [...]               f32    given: static; None: found from `x`
        ->     [..., E], [..., N]  any    float8_e4m3fn, and the scale to multiply by

    Raises OptionError where what is asked for contradicts itself.
    """
    if scale is not None and (per_token or group_size):
        raise OptionError(
            "`quant_fp8` got a scale, and was asked to find one", hint="leave `per_token` and `group_size` out"
        )
    if group_size < 0 or (group_size and x.shape[-1] % group_size):
        raise OptionError(
            f"rows of {x.shape[-1]} do not fall into groups of {group_size}",
            hint="`group_size` divides the row's width; 0 means no groups",
        )
    if scale is not None:
        return torch.ops.piecework.quant_fp8_static(x, scale), scale
    quantised, found = torch.ops.piecework.quant_fp8_dynamic(x, per_token, group_size)
    return quantised, found
