"""What stands for an opaque operator while a whole graph is tried: the operator's own work lies outside it.

A body may need a step, a cache, a device. A stand-in needs none: it fills what the operator writes and gives with
smooth numbers that follow from its float arguments row by row, so that an error in one of them is an error in its
results. Text and compiled form are tried with the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.values.declaration import registry
from piecework.values.tree import leaves, map_leaves


def stand_in(operator: Any) -> Callable[..., Any]:
    """Return what stands for an operator, or for its only overload: a function of the same arguments."""
    overload = operator if isinstance(operator, torch._ops.OpOverload) else getattr(operator, operator.overloads()[0])

    def body(*args: Any, **kwargs: Any) -> Any:
        schema = overload._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        floats = [
            leaf for name, value in given.items() if name not in written for _, leaf in leaves(value, name)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()
        ]  # fmt: skip
        for name in written:
            if isinstance(given.get(name), Tensor):
                given[name].copy_(_mixed(floats, given[name]))
        if not schema.returns:
            return None
        results = overload(*map_leaves(_without_memory, list(args), "args"), **map_leaves(_without_memory, kwargs, "k"))
        device = next((leaf.device for _, leaf in leaves([args, kwargs], "a") if isinstance(leaf, Tensor)), None)
        return map_leaves(lambda _, leaf: _made(floats, leaf, device), results, "result")

    return body


def stand_ins(names: Sequence[str]) -> Mapping[str, Callable[..., Any]]:
    """Return stand-ins of those of the operators `ns::op` that are declared opaque."""
    found = {}
    for name in names:
        if registry.get(name) is not None:
            space, _, short = name.partition("::")
            found[name] = stand_in(getattr(getattr(torch.ops, space), short))
    return found


def _without_memory(_: str, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _made(floats: Sequence[Tensor], like: Any, device: torch.device | None) -> Any:
    if not isinstance(like, Tensor):
        return like
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return made.copy_(_mixed(floats, made))


def _mixed(floats: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return numbers between -1 and 1 of the shape of `like`: zeros where there is nothing to mix.

    Tensors:
        floats  [...]  any
        like    [...]  any
        ->      [...]  any  in the widest dtype of `floats`
    """
    if not floats or not like.numel() or not like.is_floating_point():
        return torch.zeros_like(like)
    rows, width = like.shape[0] if like.dim() else 1, math.prod(like.shape[1:])
    wide = torch.float64 if any(each.dtype is torch.float64 for each in floats) else torch.float32
    total = torch.zeros((rows, width), dtype=wide, device=like.device)
    for each in floats:
        is_by_row = each.dim() > 0 and each.shape[0] == rows
        flat = each.reshape(rows, -1) if is_by_row else each.reshape(1, -1).expand(rows, -1)
        total += flat[:, torch.arange(width, device=like.device) % flat.shape[1]].to(wide)
    return torch.tanh(total / len(floats)).view(like.shape)
