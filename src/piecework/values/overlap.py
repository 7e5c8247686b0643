"""Whether two tensors have an element in common, which neither their addresses nor their storages tell alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_MOST_ELEMENTS = 1 << 22


def is_overlapping(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Tell whether two tensors share an element; above some millions of elements, whether their extents meet.

    Tensors:
        one, two  [...]  any  read for their layout alone
    """
    if one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr() or not one.numel() or not two.numel():
        return False
    begins, ends = zip(*map(_extent, (one, two)), strict=True)
    if max(begins) >= min(ends):
        return False
    if max(end - begin for begin, end in zip(begins, ends, strict=True)) > _MOST_ELEMENTS:
        return True
    taken = torch.zeros(max(ends) - min(begins), dtype=torch.bool)
    for view in _byte_views(taken, one, begins[0] - min(begins)):
        view.fill_(True)
    return any(bool(view.any()) for view in _byte_views(taken, two, begins[1] - min(begins)))


def shared_with_written(
    written: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> tuple[str, str] | None:
    """Return the first written tensor that shares an element with another tensor of `others`, and that one's name.

    Tensors:
        written, others  [...]  any  by name; read for their layout alone
    """
    by_storage: dict[int, list[str]] = {}
    for name, tensor in others.items():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for one, tensor in written.items():
        for two in by_storage.get(tensor.untyped_storage().data_ptr(), ()):
            if one != two and others[two] is not tensor and is_overlapping(tensor, others[two]):
                return one, two
    return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor and the one after its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _byte_views(taken: torch.Tensor, tensor: torch.Tensor, begin: int) -> list[torch.Tensor]:
    """Return views of a map of bytes, laid out as the tensor is: for each byte of an element one."""
    steps = [step * tensor.element_size() for step in tensor.stride()]
    return [taken.as_strided(tensor.shape, steps, begin + byte) for byte in range(tensor.element_size())]
