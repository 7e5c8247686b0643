"""Bytes as time: a bandwidth that is given, or the one that a copy reaches on the device."""

from __future__ import annotations

import re
import statistics
import time

import torch

from piecework.errors import OptionError

MEASURED = "measured"
_UNITS = {"": 1.0, "MB/S": 1e6, "GB/S": 1e9, "TB/S": 1e12}
_REPEATS = 9
_COPY_BYTES = 256 << 20  # several times what caches hold


def read_bandwidth(text: str, device: str) -> float:
    """Return bytes a second: of `3.35TB/s`, `900 GB/s` or a plain number, or what a copy reaches here (`measured`)."""
    if text == MEASURED:
        return measure_bandwidth(device)
    match = re.fullmatch(r"([\d.]+(?:e\+?\d+)?)\s*([MGT]B/s)?", text.strip(), re.IGNORECASE)
    value = float(match[1]) * _UNITS[(match[2] or "").upper()] if match and match[1].count(".") < 2 else 0.0
    if value <= 0:
        raise OptionError(f"`{text}` is no bandwidth", hint="write it as `3.35TB/s`, `900GB/s`, or `measured`")
    return value


def measure_bandwidth(device: str, copy_bytes: int = _COPY_BYTES) -> float:
    """Copy memory on the device, and return the bytes read and written a second: the median of nine copies."""
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = [_seconds(source, target) for _ in range(_REPEATS)]
    return 2 * copy_bytes / statistics.median(seconds)


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Time one copy.

    Tensors:
        source, target  [N]  u8
    """
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    began = time.perf_counter()
    target.copy_(source)
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    return time.perf_counter() - began
