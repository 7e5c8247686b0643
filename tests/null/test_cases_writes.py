"""Writes in place and views across cuts: each model gives what it gives uncompiled, and leaves its inputs alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from case_operators import assert_serves, compile_case, rows
from piecework.errors import SplitError

ops = torch.ops.cases


class WriteBesideView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        v = y[:, :2]
        z = ops.fresh(y)
        y.add_(1)
        return v + z[:, :2]


class WriteBesideChainOfViews(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        a, b = y.view(-1, 2, 2).transpose(1, 2).chunk(2, -1)
        z = ops.fresh(y)
        y.mul_(3)
        a.sub_(z[:, :2].unsqueeze(-1))
        return a + b + y.view(-1, 2, 2)


class WriteOfViewSeenWhole(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.zeros(x.shape[0], 4)
        v = y[:, 1:3]
        z = ops.fresh(x)
        v.copy_(z[:, :2])
        w = ops.fresh(z)
        return y + w, v


class WriteAfterWrite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        v = y.add_(1).view(-1)
        z = ops.fresh(y)
        y.relu_()
        v += 1
        return y * z + v.view(-1, 4)


class WriteOfInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x)
        x.mul_(2)
        z = ops.fresh(y + x)
        return z + x


class WriteByItem(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        z = ops.fresh(y)
        y += 1
        y[:, 0] = z[:, 1]
        w = ops.fresh(y)
        y.relu_()
        return y, w


class OperatorWrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        o = torch.relu(x)
        v = o.view(-1)
        ops.into(x, o)
        a = v * 2
        ops.into(a.view(-1, 4), o)
        return v + a


class OperatorWritesView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = torch.relu(x * 2 - 1)
        o = torch.zeros_like(q)
        ops.into(q.view(-1, 2, 2), o.view(-1, 2, 2))
        return o + q


class ViewOfEarlierResult(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x)
        a = y.view(-1, 2, 2)
        z = ops.fresh(torch.relu(y - 1))
        return z.view(-1, 2, 2) + a


class ViewOfInputReturned(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = x[:, :2]
        y = ops.fresh(x + 1)
        return v * y[:, 2:], v


class WriteBeforeTransform(nn.Module):
    """What `torch.func` makes of a tensor lies where the tensor does."""

    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x)
        y.view(-1).add_(x.shape[0])
        return torch.func.vmap(lambda row: row * 2)(y)


class BufferWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x)
        self.seen.add_(y.sum(0))
        return ops.fresh(y) + self.seen


MODELS = [
    WriteBesideView, WriteBesideChainOfViews, WriteOfViewSeenWhole, WriteAfterWrite, WriteOfInput, WriteByItem,
    OperatorWrites, OperatorWritesView, ViewOfEarlierResult, ViewOfInputReturned, WriteBeforeTransform,
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_writes_are_seen_where_they_would_be(model: type[nn.Module]) -> None:
    assert_serves(model(), rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [WriteBesideChainOfViews, WriteOfViewSeenWhole, WriteByItem, OperatorWrites],
    ids=lambda model: model.__name__,
)
def test_writes_are_seen_where_they_would_be_when_compiled(model: type[nn.Module]) -> None:
    options = {"ranges": ((1, 65),), "max_num_batched_tokens": 65}
    assert_serves(model(), rows, compiler="inductor", sizes=(1, 2, 65), options=options)


def test_a_result_shares_memory_where_the_model_s_does() -> None:
    program = compile_case(WriteOfViewSeenWhole(), rows(5))
    _, view = program(*rows(7))
    assert view.untyped_storage().nbytes() == 7 * 4 * 4
    x = rows(7)[0]
    assert compile_case(ViewOfInputReturned(), rows(5))(x)[1].data_ptr() == x.data_ptr()


def test_a_buffer_that_forward_writes_is_the_model_s_own() -> None:
    model, twin = BufferWritten(), BufferWritten()
    program = compile_case(model, rows(5))
    model.seen.zero_()
    for size in (3, 1, 70):
        x = rows(size)[0]
        with torch.no_grad():
            assert torch.equal(program(x), twin(x))
    assert torch.equal(model.seen, twin.seen)


def test_autocast_around_an_opaque_call_is_refused() -> None:
    class Spanning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = ops.fresh(x @ torch.ones(4, 4))
                return y @ torch.ones(4, 4)

    with pytest.raises(SplitError, match="an opaque call stands inside `torch.autocast`"):
        compile_case(Spanning(), rows(5))


def test_autocast_that_does_nothing_or_ends_before_the_cut_is_served() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                y = ops.fresh(x * 2)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = y @ torch.ones(4, 4)
            with torch.enable_grad():
                return ops.fresh(z.float()) + 1

    assert_serves(Inside(), rows)
