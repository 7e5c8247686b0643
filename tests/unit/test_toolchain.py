"""The toolchain's factors: what changes code stands in them, the number of a device does not."""

from __future__ import annotations

import torch

from piecework.seam.toolchain import toolchain


def test_the_default_dtype_is_a_factor() -> None:
    before = toolchain("cpu")
    torch.set_default_dtype(torch.float64)
    try:
        after = toolchain("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name for name in before if before[name] != after[name]} == {"default_dtype"}


def test_a_device_is_named_by_its_type() -> None:
    assert toolchain("cpu:0") == toolchain("cpu")
    assert toolchain("cpu")["device"] == "cpu"
