"""What a device has worked out, read by the host once it is there, while the device goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Read = Callable[[], list[Tensor]]


def read_back(tensors: Sequence[Tensor]) -> Read:
    """Start copies to the host; return what waits for them. What is given to the device afterwards is not waited for.

    Tensors:
        tensors  [...]  any
    """
    if not tensors or tensors[0].device.type != "cuda":
        return lambda: list(tensors)
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # to pinned memory
    done = torch.cuda.Event(blocking=True)  # a wait that leaves the core to others: there is a whole step of time
    done.record(torch.cuda.current_stream(tensors[0].device))

    def read() -> list[Tensor]:
        done.synchronize()
        return copies

    return read
