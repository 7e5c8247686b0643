"""Weights that a build draws: in memory of their own; large ones on a GPU in the same memory, without being equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from piecework.stages.verify.draw import Source
from piecework.values.signature import TensorSpec

LARGE, WIDE, SMALL = (2048, 4096), (4096, 4096), (64, 64)


def source(device: str, *shapes: tuple[int, ...]) -> Source:
    weights = [(f"w{n}", TensorSpec("bfloat16", s, None, device, is_weight=True)) for n, s in enumerate(shapes)]
    return Source(cast(Any, SimpleNamespace(parameters=weights)))


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def test_large_weights_on_another_device_take_the_memory_of_the_largest() -> None:
    found = source("meta", LARGE, WIDE, SMALL, WIDE).draw({})
    assert [tuple(each.shape) for each in found] == [LARGE, WIDE, SMALL, WIDE]
    assert len({memory(each) for each in found}) == 2
    taken = found[1].untyped_storage().nbytes()
    assert WIDE[0] * WIDE[1] * 2 <= taken < 1.01 * WIDE[0] * WIDE[1] * 2
    assert len({each.storage_offset() for each in (found[0], found[1], found[3])}) == 3


def test_on_a_cpu_each_weight_has_memory_of_its_own() -> None:
    found = source("cpu", LARGE, LARGE).draw({})
    assert memory(found[0]) != memory(found[1])
    assert not torch.equal(found[0], found[1])


def test_another_kind_of_numbers_lets_go_of_what_was_drawn() -> None:
    drawing = source("meta", LARGE)
    first = drawing.draw({})[0]
    assert drawing.draw({})[0] is first
    drawing.is_positive = True
    assert drawing.draw({})[0] is not first
    assert len(drawing._weights) == 2  # the weight, and the memory that it lies in
