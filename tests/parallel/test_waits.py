"""No cut comes between a collective and its wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework.seam.collectives import prepare
from piecework.seam.groups import standing_in

GROUP = "of_one_test"


@pw.split_op("parallel_test::halve")
def halve(x: Tensor) -> Tensor:
    return x / 2


torch.library.define("parallel_test::halve", "(Tensor x) -> Tensor")
torch.library.impl("parallel_test::halve", "CompositeExplicitAutograd")(halve)
torch.library.register_fake("parallel_test::halve")(lambda x: torch.empty_like(x))


class Late(nn.Module):
    """Waits for a sum after an opaque call, or before it."""

    def __init__(self, *, waits_first: bool, through_view: bool = False) -> None:
        super().__init__()
        self.waits_first, self.through_view = waits_first, through_view

    def forward(self, x: Tensor) -> Tensor:
        c10d = torch.ops._c10d_functional
        total = c10d.all_reduce(x * 2, "sum", GROUP)
        if self.waits_first:
            total = c10d.wait_tensor(total)
        half = torch.ops.parallel_test.halve(x + 1)
        if self.through_view:
            total = total.view(-1)
        if not self.waits_first:
            total = c10d.wait_tensor(total)
        return total.reshape(x.shape) + half


def compiled(model: nn.Module, **more: Any) -> Any:
    prepare()
    options = pw.CompileOptions(compiler="eager", **more)
    return pw.compile(model, (torch.ones(4, 3),), dynamic={"x": {0: "n"}}, options=options, store=pw.MemoryStore())


@pytest.mark.parametrize("through_view", [False, True])
@pytest.mark.parametrize("partition", ["fx", "inductor"])
def test_a_cut_between_a_collective_and_its_wait_is_refused(partition: str, through_view: bool) -> None:
    with standing_in(GROUP, 1), pytest.raises(pw.errors.SplitError) as caught:
        compiled(Late(waits_first=False, through_view=through_view), partition=partition)
    assert "a cut would part `_c10d_functional::all_reduce` from" in caught.value.message
    assert "wait for the collective before the opaque call" in caught.value.hint


def test_a_collective_that_is_waited_for_may_stand_before_a_cut() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    with standing_in(GROUP, 1):
        program = compiled(Late(waits_first=True))
        assert torch.equal(program(x), x * 2 + (x + 1) / 2)


def test_without_a_cut_nothing_is_parted() -> None:
    x = torch.ones(4, 3)
    with standing_in(GROUP, 1):
        assert torch.equal(compiled(Late(waits_first=False), partition="none")(x), x * 3)


def test_a_collective_as_a_split_point_takes_its_wait_along() -> None:
    names = ("_c10d_functional::all_reduce",)
    with standing_in(GROUP, 1):
        with pytest.raises(pw.errors.SplitError, match="a cut would part"):
            compiled(Late(waits_first=True), split_ops=names)
        program = compiled(Late(waits_first=True), split_ops=(*names, "_c10d_functional::wait_tensor"))
        assert torch.equal(program(torch.ones(4, 3)), torch.full((4, 3), 3.0))
