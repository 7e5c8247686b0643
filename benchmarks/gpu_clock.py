"""Time calls on a GPU: by its own events, and by how long the host is held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def device_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Return the median time of a call on the device."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times), 4)


def host_us(call: Callable[[], Any], repeats: int = 50) -> float:
    """Return the median time until a call returns, the device idle before each."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(statistics.median(times) * 1e6, 2)
