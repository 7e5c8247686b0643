"""Memory at fixed addresses on the CPU: what a dry device's graphs allocate, read and write."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.errors import CaptureError

ALIGNMENT = 512
_POISON = 0xFF  # a NaN in every floating-point type


class DryPool:
    """Memory at fixed addresses, handed out first fit; a block comes back when the last tensor over it is gone."""

    def __init__(self, capacity: int) -> None:
        self._memory = mmap.mmap(-1, capacity)
        self.base = ctypes.addressof(ctypes.c_byte.from_buffer(self._memory))
        self.capacity = capacity
        self.high_water = 0
        self._free = [(0, capacity)]

    def holds(self, address: int) -> bool:
        return self.base <= address < self.base + self.capacity

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the pool."""
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        size = -(-max(extent * dtype.itemsize, 1) // ALIGNMENT) * ALIGNMENT
        offset = self._take(size)
        block = (ctypes.c_byte * size).from_buffer(self._memory, offset)
        weakref.finalize(block, self._give_back, offset, size)
        raw = torch.frombuffer(block, dtype=torch.uint8)
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, tuple(shape), tuple(stride))

    def _take(self, size: int) -> int:
        for index, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(offset + size, length - size)] if length > size else []
                self.high_water = max(self.high_water, offset + size)
                return offset
        raise CaptureError("the dry pool is full", hint="make the device with more `pool_bytes`")

    def _give_back(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def poison(self) -> None:
        ctypes.memset(self.base, _POISON, self.high_water)


def alias_of(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not keep it."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor
    raw = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype).set_(
        flat.untyped_storage(), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())
    )
