"""Whether tensors still lie where they lay: asked of some hundred weights on every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def address_check(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Callable[[], bool]:
    """Return what tells whether every tensor lies at its address.

    Torch's builds for CUDA have it as one call, made for their own graphs; elsewhere each tensor is asked.

    Tensors:
        tensors  [...]  any
    """
    listed, wanted = list(tensors), list(addresses)
    in_one_call = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if in_one_call is not None:
        positions = list(range(len(listed)))
        return lambda: bool(in_one_call(listed, wanted, positions))
    return lambda: list(map(Tensor.data_ptr, listed)) == wanted
