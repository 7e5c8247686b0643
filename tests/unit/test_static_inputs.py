"""Static inputs: what a padded step finds beyond its own rows."""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.runtime.buffers import InputPlan, StaticInputs
from piecework.values.signature import TensorSpec


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def make(dtype: str) -> StaticInputs:
    plan = InputPlan("x", "x", TensorSpec(dtype, ("s0",), None, "cpu"), ((0, "s0"),), False)
    return StaticInputs([plan], 8, torch.device("cpu"), copy)


def test_indices_of_a_larger_size_are_not_left_to_a_smaller_one() -> None:
    inputs = make("int64")
    inputs.load(8, 8, [torch.arange(8).flip(0)])
    inputs.load(4, 2, [torch.tensor([1, 0])])
    assert int(inputs.at(4)["x"].max()) < 4
    assert inputs.at(8)["x"].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_floats_share_one_buffer() -> None:
    inputs = make("float32")
    assert inputs.at(8)["x"].data_ptr() == inputs.at(4)["x"].data_ptr()
    assert inputs.size_bytes == 32
