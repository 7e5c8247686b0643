"""What an operator does on a GPU, beside the model: the kernels that a profiler saw, how often, and their time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from piecework.diagnostics.traffic.operators import OperatorCall, operator_at
from piecework.errors import OptionError

_WARM_UPS, _CALLS = 3, 20


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call: launches a call, and device time a call."""

    name: str
    launches: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """A call as a profiler saw it: the mean of many."""

    kernels: tuple[Kernel, ...]

    @property
    def launches(self) -> float:
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)


def measure_operator(name: str, call: OperatorCall, tokens: int) -> Measured:
    """Run an operator eagerly on a GPU under a profiler. Raises OptionError where the device is no GPU."""
    if torch.device(call.device).type != "cuda" or not torch.cuda.is_available():
        raise OptionError(
            f"launches are counted on a GPU, and the device is `{call.device}`",
            hint="give `--device cuda` on a machine that has one, or leave `--profile` out",
        )
    module, given = operator_at(name, call, tokens)
    with torch.no_grad():
        return measure_calls(lambda: module(given))


def measure_calls(run: Callable[[], Any]) -> Measured:
    """Profile some calls after a few to warm up, and return the means of one."""
    for _ in range(_WARM_UPS):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_CALLS):
            run()
        torch.cuda.synchronize()
    kernels = [
        Kernel(row.key, row.count / _CALLS, row.self_device_time_total / 1e6 / _CALLS)
        for row in profiler.key_averages()
        if row.device_type.name == "CUDA"
    ]
    return Measured(tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)))
