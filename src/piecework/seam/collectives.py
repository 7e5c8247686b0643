"""Collectives as a graph holds them: functional, each waited for at once, the group by its name.

A collective and its wait stand next to one another, so that no cut comes between them; a compiler that overlaps them
moves the wait itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALL_REDUCE = "_c10d_functional::all_reduce"
REDUCE_SCATTER = "_c10d_functional::reduce_scatter_tensor"
ALL_GATHER = "_c10d_functional::all_gather_into_tensor"
WAIT = "_c10d_functional::wait_tensor"


def overload(name: str) -> Any:
    """Return the operator of a collective's name, as a graph calls it."""
    return getattr(torch.ops._c10d_functional, name.partition("::")[2]).default


def prepare() -> None:
    """Let collectives be traced: their results' shapes are told by a module that torch loads on demand."""
    import torch.distributed._functional_collectives  # noqa: F401


def all_reduce(value: Tensor, group: str) -> Tensor:
    """Sum a tensor over all ranks.

    Tensors:
        value  [...]  any
        ->     [...]  any  the sum, equal on all ranks
    """
    c10d = torch.ops._c10d_functional
    total: Tensor = c10d.wait_tensor(c10d.all_reduce(value, "sum", group))
    return total


def reduce_scatter(value: Tensor, ranks: int, group: str) -> Tensor:
    """Sum a tensor over all ranks and keep this rank's rows of it.

    Tensors:
        value  [N*R, ...]  any  N rows for each of the R ranks
        ->     [N, ...]    any
    """
    c10d = torch.ops._c10d_functional
    rows: Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(value, "sum", ranks, group))
    return rows


def all_gather(value: Tensor, ranks: int, group: str) -> Tensor:
    """Join the rows of all ranks, in the order of ranks.

    Tensors:
        value  [N, ...]    any
        ->     [N*R, ...]  any  equal on all ranks
    """
    c10d = torch.ops._c10d_functional
    joined: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(value, ranks, group))
    return joined


def all_gather_last(value: Tensor, ranks: int, group: str) -> Tensor:
    """Join the last dimension of all ranks.

    Tensors:
        value  [..., N]    any
        ->     [..., N*R]  any  equal on all ranks
    """
    flat = value.reshape(-1, value.shape[-1])
    joined = all_gather(flat.contiguous(), ranks, group)
    by_row = joined.view(ranks, -1, value.shape[-1]).transpose(0, 1)
    return by_row.reshape(*value.shape[:-1], ranks * value.shape[-1])
