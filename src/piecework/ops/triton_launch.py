"""Launch a Triton kernel again without the search that comes before it. Importing this needs no Triton.

Triton looks at every argument of every call to find the binary that fits, which takes the host several times as long as
the launch. The layers of a step make the same calls on other tensors, so what was found for one serves all.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Grid = tuple[int, int, int]
Call = Callable[[Grid, Sequence[Any]], None]
Quick = Callable[[Any], Call | None]
"""Makes of a binary what launches it with addresses and numbers, constants among them; None where that cannot be."""
WANTED_PROGRAMS = 256  # of a launch: about two for each multiprocessor of a large GPU; work is split to have as many
_ALIGNMENT = 16  # bytes: an address that is no multiple of it gets a binary of its own


def by_triton(binary: Any) -> Call:
    """Launch a binary as Triton does, on the current stream."""
    return lambda grid, arguments: binary[grid](*arguments)


class Kernel:
    """One kernel, whose parameters are tensors, numbers that choose no binary, numbers that do, and constants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: dict[Any, Call] = {}

    def bind(
        self,
        grid: tuple[int, ...],
        free: tuple[int | float, ...],
        fixed: tuple[int, ...],
        constants: tuple[Any, ...],
        quick: Quick,
    ) -> Launch:
        """Return what launches the kernel on given tensors; `free` holds numbers of 32 bits."""
        whole: Grid = (*grid, 1, 1)[:3]  # type: ignore[assignment]
        return Launch(self, whole, (*free, *fixed, *constants), (fixed, constants, quick), quick)


class Launch:
    """A kernel with all but its tensors, which are of the same dtypes, on one GPU, in every call."""

    __slots__ = ("_call", "_grid", "_kernel", "_key", "_numbers", "_quick")

    def __init__(
        self, kernel: Kernel, grid: Grid, numbers: tuple[Any, ...], key: tuple[Any, ...], quick: Quick
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._numbers = numbers
        self._key = key
        self._quick = quick
        self._call: Call | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream.

        Tensors:
            tensors  [...]  any  read or written as the kernel does
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        if functools.reduce(operator.or_, addresses) % _ALIGNMENT:
            self._kernel.kernel[self._grid](*tensors, *self._numbers)
        elif self._call is not None:
            self._call(self._grid, (*addresses, *self._numbers))
        else:
            self._find(tensors, addresses)

    def _find(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        key = (*self._key, tensors[0].device.index, *[tensor.dtype for tensor in tensors])
        self._call = self._kernel.calls.get(key)
        if self._call is not None:
            self._call(self._grid, (*addresses, *self._numbers))
            return
        binary = self._kernel.kernel[self._grid](*tensors, *self._numbers)
        if binary is not None:  # Triton's interpreter, which runs on a CPU, gives none
            self._call = self._kernel.calls[key] = self._quick(binary) or by_triton(binary)
