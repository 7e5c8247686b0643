"""Kernels in Triton for rows: imported where Triton is at hand and a call is to run on a GPU, never before.

One program a row, the row in one block. Arithmetic is in float32, rounded where the references round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, width, variance_size, epsilon,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row + at, values.to(total.dtype.element_ty), mask=inside)
    counted = tl.where(at < variance_size, values, 0.0)
    values = values * tl.rsqrt(tl.sum(counted * counted, axis=0) / variance_size + epsilon)
    if HAS_WEIGHT:
        factor = tl.load(weight + at, mask=inside, other=0.0)
        values = (values.to(factor.dtype) * factor).to(tl.float32)
    tl.store(out + row + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul_kernel(gate, up, out, width, gate_row, up_row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    bent = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    bent = (bent * tl.sigmoid(bent)).to(out.dtype.element_ty)
    factor = tl.load(up + row * up_row + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, (bent * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quantise_kernel(x, scale, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    found = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-12) / 448.0
    tl.store(scale + row, found)
    values = tl.minimum(tl.maximum(values / found, -448.0), 448.0)
    tl.store(out + row * width + at, values.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Norm each row.

    Tensors:
        x       [..., E]  model
        weight  [E]       any
        ->      [..., E]  model
    """
    return _norm(x, None, weight, epsilon, variance_size)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual and norm each row.

    Tensors:
        x, residual  [..., E]            model
        weight       [E]                 any
        ->           [..., E], [..., E]  model
    """
    return _norm(x, residual, weight, epsilon, variance_size)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> tuple[Tensor, Tensor]:
    rows, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(rows)
    total = torch.empty_like(rows) if residual is not None else out
    added = residual.contiguous() if residual is not None else rows
    _rms_norm_kernel[(rows.numel() // width,)](
        rows, added, weight if weight is not None else rows, out, total, width, variance_size or width, epsilon,
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out, total


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply `up` by the SiLU of `gate`; halves of one tensor are read where they are.

    Tensors:
        gate, up  [..., F]  model
        ->        [..., F]  model
    """
    width = gate.shape[-1]
    first, second = gate.reshape(-1, width), up.reshape(-1, width)
    if first.stride(1) != 1 or second.stride(1) != 1:
        first, second = first.contiguous(), second.contiguous()
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _silu_and_mul_kernel[(first.shape[0], triton.cdiv(width, 1024))](
        first, second, out, width, first.stride(0), second.stride(0), BLOCK=1024
    )
    return out


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row by the scale at which its largest value fits.

    Tensors:
        x   [..., E]             model
        ->  [..., E], [..., 1]   any    float8_e4m3fn, and scales in float32
    """
    rows, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    _quantise_kernel[(rows.numel() // width,)](rows, scale, out, width, BLOCK=triton.next_power_of_2(width))
    return out, scale
