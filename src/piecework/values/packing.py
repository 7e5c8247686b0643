"""Weights that lie one after another in one tensor: parts become views of its rows, and no second copy is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over the memory of parts that lie one after another; None where they do not.

    Tensors:
        parts  [R, ...]  any  differ in their first size alone
        ->     [S, ...]  any  a view: S rows are those of all parts
    """
    first = parts[0]
    place = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not same or not part.is_contiguous() or part.storage_offset() != place or part.shape[1:] != first.shape[1:]:
            return None
        place += part.numel()
    rows = sum(part.shape[0] for part in parts)
    # Not a view of the first part: one that was made in inference mode has none outside it.
    found = torch.empty(0, dtype=first.dtype, device=first.device)
    return found.set_(first.untyped_storage(), first.storage_offset(), (rows, *first.shape[1:]), first.stride())


def allocate(sizes: Sequence[int], like: Tensor, dtype: torch.dtype, device: Any) -> tuple[Tensor, ...]:
    """Return parts that lie one after another, of so many rows each and otherwise of the shape of `like`.

    Tensors:
        like  [R, ...]  any
        ->    [...]     any  uninitialised
    """
    whole = torch.empty((sum(sizes), *like.shape[1:]), dtype=dtype, device=device)
    return torch.split(whole, list(sizes))


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor that holds the parts; each part itself becomes a view of its rows, and its memory is let go.

    Whoever holds a part (a module its parameter) reads and writes the joined tensor from now on.

    Tensors:
        parts  [R, ...]  any  CHANGED: they lie in the result's memory afterwards
        ->     [S, ...]  any
    """
    known = joined(parts)
    if known is not None:
        return known
    first, sizes = parts[0], [part.shape[0] for part in parts]
    # A parameter that was made in inference mode can be given nothing but a tensor that was made there as well.
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        whole = torch.empty((sum(sizes), *first.shape[1:]), dtype=first.dtype, device=first.device)
        for part, view in zip(parts, torch.split(whole, sizes), strict=True):
            view.copy_(part)
            part.data = view
    return whole


def part_specs(binding: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names that a binding of a record is joined of, with the shape of each; none for a plain weight.

    The binding's own spec gives every size but the first.
    """
    parts = binding.get("parts", ())
    rest = str(binding["spec"]).partition("[")[2].partition("]")[0].split(", ")[1:] if parts else []
    return {name: (int(rows), *map(int, rest)) for name, rows in parts}
