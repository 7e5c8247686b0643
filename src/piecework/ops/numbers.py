"""Whole numbers that the host has worked out, on their way to a device."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

_DTYPES = {"i": torch.int32, "q": torch.int64, "d": torch.float64}


def on_device(numbers: array[int] | array[float], device: str | torch.device) -> Tensor:
    """Put numbers on a device without waiting for the steps that are under way there.

    Tensors:
        ->  [N]  any  of the array's own type; on a CPU the array's own memory
    """
    dtype = _DTYPES[numbers.typecode]
    if not numbers:
        return torch.empty(0, dtype=dtype, device=device)
    here = torch.frombuffer(numbers, dtype=dtype)
    if torch.device(device).type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)
