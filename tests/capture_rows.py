"""Operators on rows with what can go wrong in each, a model of rows, and capture of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capture_toys import WIDTH, captured, operator
from piecework.ops.count import true_count

ROWS = {"x": {0: "tokens"}}
LENGTHS = {"longest": 1}


def _count(x: Tensor) -> Tensor:
    return x * true_count(x.shape[0])


def _padded_count(x: Tensor) -> Tensor:
    return x * x.shape[0]


def _decide(x: Tensor) -> Tensor:
    return x * (1 + LENGTHS["longest"] // 1000)


def _noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


operator("count(Tensor x) -> Tensor", _count, torch.empty_like, support="never")
operator("padded_count(Tensor x) -> Tensor", _padded_count, torch.empty_like, support="never")
operator("decide(Tensor x) -> Tensor", _decide, torch.empty_like, support="never")
operator("decide_claimed(Tensor x) -> Tensor", _decide, torch.empty_like, support="always")  # it lies
operator("noise(Tensor x) -> Tensor", _noise, torch.empty_like, support="always")


class Rows(torch.nn.Module):
    """A product of rows with an operator of the tests between."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.name = name

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = getattr(torch.ops.capture_toys, self.name)(x @ self.weight)
        return torch.relu(x) + 1 if bias is None else torch.relu(x) + bias


def rows(count: int, seed: int = 0) -> Tensor:
    """Make rows."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def replaying(name: str, capture: str, **options: Any) -> tuple[Rows, Any]:
    """Capture a model of rows that was never traced: its operators stand outside the graphs, or in one."""
    model = Rows(name)
    return model, captured(model, mode="none", example=(rows(4),), dynamic=ROWS, decode=capture, **options)
