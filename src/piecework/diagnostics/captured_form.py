"""A piece as a capture runs it: recorded once as a graph on the inputs of a step, and replayed on the same addresses.

On a CPU the dry device records it, on a GPU the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piecework.seam.cuda import CudaDevice
from piecework.seam.dry import DryDevice
from piecework.values.artifact import LoadedPiece
from piecework.values.device import Device
from piecework.values.difference import copy_of

MakeDevice = Callable[[], Device]
_POOL_BYTES = 1 << 32  # of addresses: memory is taken as it is written


def device_like(kind: str) -> MakeDevice:
    """Return what makes a device that records graphs of work on a kind of device (`cpu`, `cuda`)."""
    return CudaDevice if kind == "cuda" else partial(DryDevice, _POOL_BYTES, by_call=True)


class CapturedPiece:
    """A loaded piece each of whose calls is recorded and replayed; what it gives is what the replay wrote."""

    def __init__(self, loaded: LoadedPiece, make_device: MakeDevice) -> None:
        self._loaded = loaded
        self._make_device = make_device
        self._kept: tuple[Any, ...] = ()

    def bind(self, weights: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """Return the callable that records and replays the piece, bound to its weights."""
        return partial(self._run, self._loaded.bind(weights))

    def _run(self, call: Callable[..., tuple[Any, ...]], *given: Any) -> tuple[Any, ...]:
        tensors = [value for value in given if isinstance(value, Tensor)]
        before = [copy_of(tensor) for tensor in tensors]
        device, graph, results = self._record(call, given)
        for tensor, copy in zip(tensors, before, strict=True):
            tensor.copy_(copy)  # recording may have written to it, and the replay starts from the step's own values
        device.before_step()
        if graph is not None:
            graph.replay()
        device.synchronize()
        self._kept = (device, graph, tensors)  # the results lie in the device's pool
        return results

    def _record(
        self, call: Callable[..., tuple[Any, ...]], given: Sequence[Any]
    ) -> tuple[Device, Any, tuple[Any, ...]]:
        device = self._make_device()
        try:
            with torch.no_grad(), device.session():
                if device.name != "dry":
                    call(*given)  # whatever is loaded when first used must be there before a graph is begun
                device.begin()
                results = tuple(device.run(call, given))
                return device, device.end(), results
        except BaseException:
            device.abort()
            raise
