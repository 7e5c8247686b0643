"""Small models in which sizes, items of tuples, views or allocations cross a cut, in every spelling."""

# ruff: noqa: D101

from __future__ import annotations

import torch
from torch import Tensor, nn

import case_operators  # noqa: F401  registers the operators

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


class RowsChosenByValues(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = x[x[:, 0] > 1]
        y = ops.fresh(x)
        return torch.cat([chosen * 2, y]), ops.fresh(chosen) + chosen.shape[0]


class NumberFromValues(nn.Module):
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
    RowsChosenByValues, NumberFromValues,
]  # fmt: skip


COMPILED = [SizeTuple, SizeSlice, SizeArithmetic, SizeReturned, ChunkBefore, TwoUsed, AllocationOnly, NoSymbolPiece]
ONE_RANGE = {"ranges": ((1, 65),), "max_num_batched_tokens": 65}
