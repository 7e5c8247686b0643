"""Models that are or nearly are what a pass looks for, and what holds a program of one to eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from partitions import PARTITIONS
from piecework.events import FallBack, PassDone, Recorder
from piecework.values.difference import compare

WIDTH = 8
Results = Any
Forward = Callable[["Case", Tensor, Tensor], Results]


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """Norm as Llama writes it."""
    wide = x.float() if x.dtype is not torch.float64 else x
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
    return normed if weight is None else weight * normed


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of halves as Llama does."""
    first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return x * cos + torch.cat((-second, first), -1) * sin


def quantised(x: Tensor, scale: Tensor, limit: float = 448.0) -> Tensor:
    """Quantise to 8 bits and back."""
    return (x.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn).to(x.dtype)


class Case(nn.Module):
    """Parameters of every kind, and a case's forward."""

    scale: Tensor

    def __init__(self, forward: Forward, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self._run = forward
        self.weight = nn.Parameter(torch.rand(WIDTH, generator=source) + 0.5)
        self.wide = nn.Parameter(torch.rand(2 * WIDTH, generator=source) + 0.5)
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name != "value"))
        self.up, self.table = nn.Linear(WIDTH, 2 * WIDTH), nn.Embedding(WIDTH, WIDTH)
        self.to(dtype)
        self.register_buffer("scale", torch.tensor(0.02))

    def forward(self, x: Tensor, y: Tensor) -> Results:
        return self._run(self, x, y)


def items(results: Results) -> tuple[Tensor, ...]:
    """Return results as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def shared(tensors: tuple[Tensor, ...]) -> list[tuple[int, int]]:
    """Return the pairs of tensors that lie in one memory."""
    place = [each.untyped_storage().data_ptr() for each in tensors]
    return [(i, j) for i in range(len(place)) for j in range(i) if place[i] == place[j]]


# How a program of a case may be made: quickly by eager code, and by Inductor where the whole is run.
WAYS = [
    pytest.param(compiler, partition, marks=mark, id=f"{compiler}-{partition}")
    for compiler, mark in (("eager", pytest.mark.slow), ("inductor", pytest.mark.soak))
    for partition in PARTITIONS
    if (compiler, partition) != ("eager", "fx")
]


def hold_to_eager(
    forward: Forward, counts: dict[str, int], dtype: torch.dtype, *, compiler: str = "eager", partition: str = "fx"
) -> None:
    """Compile a case, compare its matches with `counts`, and judge results and what is written at several sizes."""
    torch.manual_seed(0)
    model, watch = Case(forward, dtype).eval().requires_grad_(False), Recorder()
    exact = copy.deepcopy(model).double()
    exact.scale = model.scale  # a quantisation's scale is float32 in any model

    def given(size: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(size)
        x, y = (torch.randn(size, WIDTH, generator=source).to(dtype) for _ in range(2))
        return x, y

    options = pw.CompileOptions(
        compiler=compiler, partition=partition, passes=("no_ops", "merge_linears_everywhere"), custom_ops=("all",),
        max_num_batched_tokens=16, ranges=((1, 16),), verify=False,
    )  # fmt: skip
    program = pw.compile(
        model, given(5), dynamic={"x": {0: "tokens"}, "y": {0: "tokens"}}, options=options, store=pw.MemoryStore(),
        observer=watch,
    )  # fmt: skip
    # A view of what is written is what compiled code cannot give: such a piece runs as its text, and says so.
    assert all("is a view of" in fallen.reason for fallen in watch.of(FallBack))
    matches = {done.name: done.matches for done in watch.of(PassDone)}
    if dtype is torch.bfloat16 or "merge_linears_everywhere" in counts:
        assert {each: matches.get(each, 0) for each in counts} == counts
    for size in (1, 2, 5, 16):
        own, right = given(size), given(size)
        wide = tuple(each.double() for each in given(size))
        with torch.no_grad():
            found, wanted, best = (items(run(*args)) for run, args in ((program, own), (model, right), (exact, wide)))
        assert shared((*found, *own)) == shared((*wanted, *right)), size
        for one, other, ideal in zip((*found, *own), (*wanted, *right), (*best, *wide), strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), size
            difference = compare(f"at {size}", one, other, ideal)
            assert not difference.is_fault, difference.fault
