"""Rows of a step that ranks share out: filled up to a multiple of the ranks, and cut back to what there was."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from piecework.ops.library import register


def fill_rows(x: Tensor, ranks: int) -> Tensor:
    """Fill rows up with zeros to a multiple of the ranks; leading dimensions of 1 go.

    Tensors:
        x   [..., T, E]  any
        ->  [N, E]       any  a multiple of the ranks, none of the memory of `x`
    """
    flat = x.reshape(-1, x.shape[-1])
    missing = -flat.shape[0] % ranks
    return F.pad(flat, (0, 0, 0, missing)) if missing else flat.clone()


def _fill_fake(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(((x.shape[-2] + ranks - 1) // ranks * ranks, x.shape[-1]))


def first_rows(x: Tensor, rows: int) -> Tensor:
    """Take the rows that were there before they were filled up.

    Tensors:
        x   [N, E]  any
        ->  [T, E]  any  none of the memory of `x`
    """
    return x[:rows].clone()


def _first_fake(x: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, x.shape[-1]))


register("fill_rows(Tensor x, int ranks) -> Tensor", fill_rows, _fill_fake)
register("first_rows(Tensor x, SymInt rows) -> Tensor", first_rows, _first_fake)
