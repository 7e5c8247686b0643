"""Functions whose traffic is counted, importable by name."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Add and norm as the registry's reference does, written out.

    Tensors:
        x, x_residual  [T, E]          any
        weight         [E]             any
        ->             [T, E], [T, E]  any
    """
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x + x_residual.to(torch.float32)
    x_residual = x.to(dtype)
    variance = x.pow(2).mean(dim=-1, keepdim=True)
    x = x * torch.rsqrt(variance + epsilon)
    x = x.to(weight.dtype) * weight
    return x.to(dtype), x_residual


def gathered_product(ids: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Look rows up in a table and multiply them by it: rows are gathered, the product reads all.

    Tensors:
        ids     [T]     i64
        weight  [E, E]  any
        bias    [E]     any
        ->      [T, E]  any
    """
    return torch.nn.functional.embedding(ids.to(torch.int64), weight) @ weight + bias


def written_in_place(x: Tensor, y: Tensor) -> Tensor:
    """Add to a fresh tensor in place, and take a view of it.

    Tensors:
        x, y  [T, E]  any
        ->    [T, E]  any
    """
    made = x * 2
    made.add_(y)
    return made.view(-1, x.shape[-1])[:, : x.shape[-1] // 2].neg()
