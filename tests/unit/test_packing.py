"""Tensors that lie one after another: parts become views of rows, in place, whatever they were made in."""

from __future__ import annotations

import torch
from torch import nn

from piecework.values.packing import allocate, join, joined, part_specs


def test_parts_become_views_of_one_tensor_and_keep_their_values() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(3, 2)
    before = torch.cat([first.weight, second.weight]).detach().clone()
    whole = join([first.weight, second.weight])
    assert torch.equal(whole, before)
    assert not whole.requires_grad
    assert first.weight.data_ptr() == whole.data_ptr()
    assert second.weight.data_ptr() == whole[4:].data_ptr()
    with torch.no_grad():
        second.weight.zero_()
    assert float(whole[4:].abs().sum()) == 0
    first(torch.rand(2, 3)).sum().backward()
    assert first.weight.grad is not None


def test_what_lies_together_already_is_not_copied() -> None:
    parts = allocate([2, 3], torch.empty(1, 5), torch.float32, "cpu")
    whole = join(parts)
    assert whole.data_ptr() == parts[0].data_ptr()
    assert whole.shape == (5, 5)
    assert join(parts).data_ptr() == whole.data_ptr()


def test_only_rows_in_their_order_without_a_gap_are_joined() -> None:
    whole = torch.rand(6, 3)
    assert joined([whole[:2], whole[2:]]) is not None
    assert joined([whole[2:], whole[:2]]) is None
    assert joined([whole[:2], whole[3:]]) is None
    assert joined([whole[:2], whole[2:, :2]]) is None
    assert joined([whole[:2], torch.rand(2, 3)]) is None
    assert joined([whole[:3].T, whole[3:].T]) is None


def test_parameters_made_in_inference_mode_stay_usable() -> None:
    with torch.inference_mode():
        first, second = (nn.Parameter(torch.rand(n, 3), requires_grad=False) for n in (2, 1))
    whole = join([first, second])
    assert join([first, second]).data_ptr() == whole.data_ptr() == first.data_ptr()
    x = torch.rand(1, 3)
    assert torch.equal(nn.functional.linear(x, first), nn.functional.linear(x, whole)[:, :2])


def test_shapes_of_parts_follow_from_the_spec_of_the_whole() -> None:
    binding = {"spec": "bfloat16[48, 32] cpu", "parts": [["q", 32], ["k", 16]]}
    assert part_specs(binding) == {"q": (32, 32), "k": (16, 32)}
    assert part_specs({"spec": "float32[6] cpu", "parts": [["b", 4], ["c", 2]]}) == {"b": (4,), "c": (2,)}
    assert part_specs({"spec": "float32[6] cpu"}) == {}
