"""What a sharded module computes: the forwards that hold a collective. No class is changed, no name of a weight moves.

A module keeps its own parameters, of this rank's slice, and says in `tensor_parallel` who it works with.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piecework.seam.collectives import all_gather_last, all_reduce

RANK = "tensor_parallel_rank"


@dataclass(frozen=True)
class Shared:
    """Who a module works with: the group's name, its number of ranks, and how long the divided dimension is whole."""

    group: str
    ranks: int
    whole: int


def use_forward(module: nn.Module, forward: Any, shared: Shared, *, reads_rank: bool = False) -> None:
    """Let a module run a forward of ours; where that reads the rank, the rank is a buffer, so an input of the graph."""
    module.tensor_parallel = shared  # type: ignore[assignment]
    if reads_rank:
        device = next(module.parameters()).device
        module.register_buffer(RANK, torch.zeros((), dtype=torch.int64, device=device))
    module.forward = types.MethodType(forward, module)


def reduced_linear(module: Any, value: Tensor) -> Tensor:
    """Multiply this rank's columns, and sum over the ranks; the bias counts once.

    Tensors:
        value  [..., E]  model  this rank's slice of the last dimension
        ->     [..., F]  model  equal on all ranks
    """
    total = all_reduce(F.linear(value, module.weight), module.tensor_parallel.group)
    return total if module.bias is None else total + module.bias


def split_linear(module: Any, value: Tensor) -> Tensor:
    """Take this rank's slice of a whole row, then do as `reduced_linear`.

    Tensors:
        value  [..., E]  model  equal on all ranks
        ->     [..., F]  model  equal on all ranks
    """
    own, shared = module.weight.shape[1], module.tensor_parallel
    padded = F.pad(value, (0, own * shared.ranks - shared.whole)) if own * shared.ranks > shared.whole else value
    slices = padded.reshape(*value.shape[:-1], shared.ranks, own)
    return reduced_linear(module, slices.index_select(-2, module.tensor_parallel_rank.reshape(1)).squeeze(-2))


def gathered_linear(module: Any, value: Tensor) -> Tensor:
    """Compute this rank's results, and join them with those of the other ranks.

    Tensors:
        value  [..., E]  model
        ->     [..., F]  model  equal on all ranks
    """
    shared = module.tensor_parallel
    joined = all_gather_last(F.linear(value, module.weight, module.bias), shared.ranks, shared.group)
    return joined[..., : shared.whole] if joined.shape[-1] > shared.whole else joined


def summed_embedding(module: Any, ids: Tensor) -> Tensor:
    """Look up the ids of this rank's part of the vocabulary, and sum over the ranks: all others give zeros.

    Tensors:
        ids  [...]     i64
        ->   [..., E]  model  equal on all ranks
    """
    own = module.weight.shape[0]
    place = ids - module.tensor_parallel_rank * own
    is_here = (place >= 0) & (place < own)
    rows = type(module).forward(module, torch.where(is_here, place, 0))
    return all_reduce(rows * is_here[..., None].to(rows.dtype), module.tensor_parallel.group)
