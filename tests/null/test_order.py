"""The order of a write and a read of hidden state stands in the graph; a write that looks dead is made all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piecework as pw

LIBRARY = torch.library.Library("order_case", "FRAGMENT")
LIBRARY.define("write(Tensor x) -> Tensor")
LIBRARY.define("read(Tensor x, Tensor? token) -> Tensor")
WRITTEN: list[float] = []


@pw.split_op("order_case::write", writes="memory")
def write(x: Tensor) -> Tensor:
    """Remember a sum, and return a token."""
    WRITTEN.append(float(x.sum()))
    return x.new_empty(0)


@pw.split_op("order_case::read", reads="memory")
def read(x: Tensor, token: Tensor | None) -> Tensor:
    """Add what was remembered last."""
    return x + WRITTEN[-1]


LIBRARY.impl("write", write, "CompositeExplicitAutograd")
LIBRARY.impl("read", read, "CompositeExplicitAutograd")
torch.library.register_fake("order_case::write", lambda x: x.new_empty(0), lib=LIBRARY)
torch.library.register_fake("order_case::read", lambda x, token: torch.empty_like(x), lib=LIBRARY)


class Ordered(nn.Module):
    """Write, then read; the token says so where it is handed on."""

    def __init__(self, hands_on: bool) -> None:
        super().__init__()
        self.hands_on = hands_on

    def forward(self, x: Tensor) -> Tensor:
        token = torch.ops.order_case.write(x * 2)
        return torch.ops.order_case.read(x + 1, token if self.hands_on else None) * 3


class OnlyWrites(nn.Module):
    """A write whose result nothing uses."""

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.order_case.write(x * 2)
        return x + 1


def compiled(model: nn.Module) -> pw.Program:
    """Compile for the eager compiler, in memory."""
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, ranges=((1, 64),))
    example = (torch.ones(4, 3),)
    return pw.compile(model, example, dynamic={"x": {0: "rows"}}, options=options, store=pw.MemoryStore())


def test_a_reader_that_takes_the_writers_token_is_served() -> None:
    model, program = Ordered(hands_on=True), compiled(Ordered(hands_on=True))
    for rows in (1, 2, 5):
        x = torch.rand(rows, 3)
        torch.testing.assert_close(program(x), model(x))


def test_a_reader_without_the_token_is_refused() -> None:
    with pytest.raises(pw.errors.SplitError) as caught:
        compiled(Ordered(hands_on=False))
    assert "`order_case::read` reads `memory` but takes no result of an operator that writes it" in caught.value.message
    assert "token" in caught.value.hint


def test_a_write_whose_result_nothing_uses_is_made() -> None:
    program = compiled(OnlyWrites())
    WRITTEN.clear()
    program(torch.ones(2, 3))
    program(torch.ones(3, 3))
    assert WRITTEN == [12.0, 18.0]
