"""Rotary positions: turn pairs of a head's elements by an angle that grows with the position."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.errors import OptionError
from piecework.ops.operators import define


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """Turn the first `rotary_dim` elements of each row and pass the rest on.

    Tensors:
        x         [..., D]  model
        cos, sin  [..., N]  any    `rotary_dim` wide, or half of that; the dimensions before are broadcast
        ->        [..., D]  model

    A pair is an element and the one half of `rotary_dim` further on, or its neighbour where `interleaved`.
    """
    half = rotary_dim // 2
    first_at = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second_at = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    first, second = x[..., first_at], x[..., second_at]
    is_half = cos.shape[-1] == half
    cos_first, sin_first = (cos, sin) if is_half else (cos[..., first_at], sin[..., first_at])
    cos_second, sin_second = (cos, sin) if is_half else (cos[..., second_at], sin[..., second_at])
    turned = (first * cos_first - second * sin_first, second * cos_second + first * sin_second)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return joined if rotary_dim == x.shape[-1] else torch.cat((joined, x[..., rotary_dim:].to(joined.dtype)), dim=-1)


define(
    "rotary",
    {"rotary(Tensor x, Tensor cos, Tensor sin, int rotary_dim, bool interleaved) -> Tensor": rotary_reference},
)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None, interleaved: bool = False) -> Tensor:
    """Turn pairs of elements of each row by the angles whose cosines and sines are given.

    Tensors:
        x         [..., D]  model
        cos, sin  [..., N]  any    `rotary_dim` wide, or half of that; the dimensions before are broadcast
        ->        [..., D]  model

    `rotary_dim` says how many elements turn: all of them where it is not given. Raises OptionError where the widths
    do not fit.
    """
    turned = x.shape[-1] if rotary_dim is None else rotary_dim
    width = cos.shape[-1]
    if turned % 2 or not 0 < turned <= x.shape[-1] or width not in (turned, turned // 2) or sin.shape[-1] != width:
        raise OptionError(
            f"`rotary` turns {turned} of {x.shape[-1]} elements by cosines of width {width} and sines of width "
            f"{sin.shape[-1]}",
            hint="`rotary_dim` is even and at most the row's width; cosines and sines are that wide, or half of it",
        )
    result: Tensor = torch.ops.piecework.rotary(x, cos, sin, turned, interleaved)
    return result
