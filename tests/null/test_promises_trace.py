"""A trace leaves nothing behind: no opaque body runs, and what the caller handed in is as it was."""

from __future__ import annotations

import contextvars

import torch
from torch import nn

import piecework as pw

OPTIONS = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, ranges=((1, 64),))
calls: list[str] = []
step: contextvars.ContextVar[float] = contextvars.ContextVar("step")

_library = torch.library.Library("leaves", "DEF")
_library.define("nothing(Tensor rows, str site) -> Tensor")
_library.define("pick(Tensor rows) -> Tensor")


@pw.split_op("leaves::nothing")
def nothing(rows: torch.Tensor, site: str) -> torch.Tensor:
    calls.append(site)
    return rows * step.get()


@pw.split_op("leaves::pick")
def pick(rows: torch.Tensor) -> torch.Tensor:
    calls.append("pick")
    return rows.argmax(-1)


_library.impl("nothing", nothing, "CPU")
_library.impl("pick", pick, "CPU")
torch.library.register_fake("leaves::nothing", lambda rows, site: torch.empty_like(rows), lib=_library)
torch.library.register_fake(
    "leaves::pick", lambda rows: torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device), lib=_library
)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen = torch.ops.leaves.pick(torch.ops.leaves.nothing(rows, "first"))
        return self.table(chosen) + rows


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slots, self.scale(rows))
        cache[0].add_(1)
        return cache.sum(0) + rows


def test_no_opaque_body_runs_at_the_trace() -> None:
    """The body looks for a step of its own engine, of which the library knows nothing."""
    model, rows = Asking(), torch.randn(5, 8)
    calls.clear()
    program = pw.compile(model, (rows,), dynamic={"rows": {0: "n"}}, options=OPTIONS, store=pw.MemoryStore())
    assert calls == []
    token = step.set(2.0)
    try:
        with torch.no_grad():
            assert torch.equal(program(rows), model(rows))
            assert torch.equal(program(rows[:3]), model(rows[:3]))
    finally:
        step.reset(token)
    assert calls == ["first", "pick"] * 4


def test_the_example_is_as_it_was() -> None:
    model, rows, slots = Writing(), torch.randn(5, 8), torch.arange(5)
    cache = torch.zeros(16, 8)
    dynamic = {"rows": {0: "n"}, "slots": {0: "n"}}
    program = pw.compile(model, (rows, cache, slots), dynamic=dynamic, options=OPTIONS, store=pw.MemoryStore())
    assert torch.equal(cache, torch.zeros(16, 8))
    other = cache.clone()
    with torch.no_grad():
        assert torch.equal(program(rows, cache, slots), model(rows, other, slots))
    assert torch.equal(cache, other)
    assert cache.any()
