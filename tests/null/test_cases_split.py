"""What crosses a cut, in every spelling: each model gives what it gives uncompiled, at every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from case_operators import assert_serves, calls, compile_case, rows
from piecework.errors import GuardError, ShapeOutOfRange
from piecework.events import Recorder, SplitDone

ops = torch.ops.cases


class SizeTuple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        s = x.shape
        y = ops.fresh(x.view(-1))
        return y.view(s) * 2


class SizeMethodTuple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        s = x.size()
        return ops.fresh(x.reshape(-1)).reshape(s) * 2


class SizeUnpacked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n, width = x.size()
        return ops.fresh(x.view(-1)).view(n, width) * 2


class SizeByPosition(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        return ops.fresh(x.view(n * 4)).view(n, 4) * 2


class SizeByKeyword(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n = x.size(dim=0)
        return ops.fresh(x.view(-1)).view(n, -1) * 2


class SizeNegative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-2]
        return ops.fresh(x.view(-1)).view(n, x.shape[-1]) * 2


class SizeSlice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(2 * 8192, 4))

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        return ops.fresh(x) + self.table[:n] * self.table[x.shape[0] : 2 * x.shape[0]]


class SizeTail(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        return ops.fresh(x.unsqueeze(1)).reshape(*lead, 4, 1).expand(*lead, 4, 3) * 2


class SizeArithmetic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        half = (n + 1) // 2
        y = ops.fresh(torch.cat([x, x]))
        return y[: n + half].sum(0) / n + y[half * 2 - 1 :].mean(0) * (n % 3) + max(n, 5) + x.numel()


class SizeOfMadeTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x, x[:1]])
        return ops.fresh(y).view(y.shape[0], 4)[: x.shape[0]] + torch.zeros(y.shape[0], 4)[: x.size(0)]


class SizeToOperator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.sized(x * 2, x.shape[0] * 2 + 1) + 1


class SizeReturned(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
        y = ops.fresh(x)
        return y * 2, x.shape[0], (y.shape[0] * 2, y.shape[1])


class ChunkBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = (x * 2).chunk(2, -1)
        return ops.fresh(a.contiguous()) + b


class SplitBefore(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = (x * 2).split([1, 2, 1], -1)
        y = ops.fresh(parts[1].contiguous())
        return torch.cat([parts[0], y, parts[2]], -1)


class TwoUsed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = ops.two(x)
        y = ops.fresh(a * 2)
        z = ops.fresh(y + 1)
        return z + b


class TwoOneUnused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _, b = ops.two(x * 2)
        return b + 1


class TwoByIndex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pair = ops.two(x)
        y = ops.fresh(x)
        return pair[1] * y + pair[0]


class AllocationOnly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x)
        o = torch.empty_like(x)
        ops.into(y, o)
        return o + 1


class AllocationNew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x)
        o = y.new_empty(x.shape[0], 4)
        ops.into(y, o)
        return o


class ViewsOnly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x).view(-1, 2, 2).transpose(1, 2)
        return ops.fresh(y.contiguous()).view(-1, 4) + 1


class ItemOnly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pair = ops.two(x)
        return ops.fresh(pair[0])


class NothingBetween(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(ops.fresh(x))


class OpaqueFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(ops.fresh(x)) + 1


class OpaqueLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x * 2)


class OnlyOpaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x)


class NoneAtAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1) + x.shape[0]


class NoSymbol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        scale = ops.fresh(self.weight).sum() * 2
        y = ops.fresh(x)
        return y @ (ops.fresh(self.weight * 2) + 1) * scale


class NoSymbolPiece(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x)
        mixed = torch.relu(self.weight - 0.5) @ self.weight
        return ops.fresh(y) @ ops.fresh(mixed)


class FreshThenPiece(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(ops.fresh(x - 1)) + 1


class AssertOnSizes(nn.Module):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        a, b, c = counts.tolist()
        for size in (a, b, c):
            torch._check(size >= 0)
            torch._check(size <= 4096)
        torch._check(a + b + c == x.shape[0])
        y = ops.fresh(x)
        return y * 2 + x.shape[0]


class RowsChosenByData(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = x[x[:, 0] > 1]
        y = ops.fresh(x)
        return torch.cat([chosen * 2, y]), ops.fresh(chosen) + chosen.shape[0]


class NumberFromData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.sum().item()
        return ops.fresh(x * 2) * total


class UnusedEffect(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        ops.put(x * 2)
        return x + 1


SPELLINGS = [
    SizeTuple, SizeMethodTuple, SizeUnpacked, SizeByPosition, SizeByKeyword, SizeNegative, SizeSlice, SizeTail,
    SizeArithmetic, SizeOfMadeTensor, SizeToOperator, SizeReturned, ChunkBefore, SplitBefore, TwoUsed, TwoOneUnused,
    TwoByIndex, AllocationOnly, AllocationNew, ViewsOnly, ItemOnly, NothingBetween, OpaqueFirst, OpaqueLast, OnlyOpaque,
    NoneAtAll, NoSymbol, NoSymbolPiece, FreshThenPiece, UnusedEffect,
    RowsChosenByData, NumberFromData,
]  # fmt: skip


COMPILED = [SizeTuple, SizeSlice, SizeArithmetic, SizeReturned, ChunkBefore, TwoUsed, AllocationOnly, NoSymbolPiece]
ONE_RANGE = {"ranges": ((1, 65),), "max_num_batched_tokens": 65}


@pytest.mark.parametrize("model", SPELLINGS, ids=lambda model: model.__name__)
def test_a_cut_changes_nothing(model: type[nn.Module]) -> None:
    assert_serves(model(), rows)


@pytest.mark.slow
@pytest.mark.parametrize("model", COMPILED, ids=lambda model: model.__name__)
def test_a_cut_changes_nothing_when_compiled(model: type[nn.Module]) -> None:
    assert_serves(model(), rows, compiler="inductor", sizes=(1, 2, 65), options=ONE_RANGE)


@pytest.mark.parametrize("model", [SizeTuple, TwoUsed, AllocationOnly, ViewsOnly], ids=lambda model: model.__name__)
@pytest.mark.parametrize("options", [{"merge_consecutive": False}, {"split_ops": (), "split_ops_only": ()}], ids=str)
def test_other_ways_to_cut_change_nothing(model: type[nn.Module], options: dict[str, Any]) -> None:
    assert_serves(model(), rows, options=options)


def test_a_size_at_which_the_model_itself_fails_is_named() -> None:
    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(64, 4)[x.shape[0] : 2 * x.shape[0]]

    with pytest.raises(
        GuardError, match=r"does not trace at sizes `tokens 33-8192`.*test_cases_split.py:\d+"
    ) as raised:
        compile_case(Tail(), rows(5))
    assert raised.value.hint.startswith("give `tokens` the largest size 32")
    program = assert_serves(
        Tail(), rows, sizes=(1, 2, 7, 32), options={"ranges": ((1, 32),), "max_num_batched_tokens": 32}
    )
    with pytest.raises(ShapeOutOfRange, match="`tokens` is `33`; the program serves `1` to `32`"):
        program(*rows(33))


def test_an_assertion_about_data_dependent_sizes() -> None:
    def make(size: int) -> tuple[Tensor, Tensor]:
        return (*rows(size), torch.tensor([size // 2, 0, size - size // 2]))

    assert_serves(AssertOnSizes(), make)


def test_a_write_that_looks_dead_is_made() -> None:
    model = UnusedEffect()
    program = compile_case(model, rows(5))
    calls.clear()
    program(*rows(7))
    assert calls == ["put 7"]


def shape_of(model: nn.Module, **options: Any) -> SplitDone:
    recorder = Recorder()
    compile_case(model, rows(5), options=options, observer=recorder)
    return recorder.of(SplitDone)[0]


def test_what_only_allocates_or_views_is_no_piece() -> None:
    assert shape_of(AllocationOnly()).sites == 1
    assert shape_of(ViewsOnly()).sites == 1
    assert shape_of(NothingBetween()).sites == 0
    assert (shape_of(NothingBetween()).regions, shape_of(NothingBetween(), merge_consecutive=False).regions) == (1, 2)
    assert shape_of(NoneAtAll()).regions == shape_of(TwoUsed(), split_ops=(), split_ops_only=()).regions == 1
