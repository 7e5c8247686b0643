"""A model with an opaque call of every shape, compiled under each way of cutting a graph, and what tests compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import piecework as pw
from piecework.values.declaration import split_op

PARTITIONS = ("fx", "inductor", "none")
WIDTH, ROWS = 8, 96
DYNAMIC = {"x": {0: "tokens"}, "slots": {0: "tokens"}}

_library = torch.library.Library("partitions", "FRAGMENT")
kept: list[tuple[Tensor, Tensor]] = []  # what `attend` was handed, and what was in it then


def _define(schema: str, body: Any, fake: Any, **declared: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"partitions::{name}", fake, lib=_library)
    split_op(f"partitions::{name}", **declared)(body)


def _write(rows: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
    cache[slots] = rows
    return cache.new_empty(0)


def _attend(query: Tensor, token: Tensor, slots: Tensor, cache: Tensor, out: Tensor, layer: str) -> None:
    kept.append((query, query.clone()))
    out.copy_(torch.tanh(query) + cache[slots] * len(layer))


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x.sum(-1)


_define("write(Tensor rows, Tensor slots, Tensor(a!) cache) -> Tensor", _write, lambda r, s, c: c.new_empty(0))
_define(
    "attend(Tensor query, Tensor token, Tensor slots, Tensor cache, Tensor(a!) out, str layer) -> ()",
    _attend, lambda *_: None, capture="uniform_decode", retains_arguments=True,
)  # fmt: skip
_define("two(Tensor x) -> (Tensor, Tensor)", _two, lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])))


class Layers(nn.Module):
    """Layers that write rows of a cache and read it, then one that gives two results.

    A compiler that orders kernels by what needs them places the query's between writing and reading.
    """

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            rows, query = layer(x).chunk(2, -1)
            query, out = torch.sigmoid(query) * 2, torch.empty_like(query)
            token = torch.ops.partitions.write(torch.relu(rows), slots, cache)
            torch.ops.partitions.attend(query, token, slots, cache, out, f"layers.{index}")
            x = x + torch.relu(out)
        one, sums = torch.ops.partitions.two(self.head(x))
        return one.sin() * sums[:, None]


def layers(count: int = 2) -> Layers:
    """Make the model with random weights."""
    torch.manual_seed(0)
    return Layers(count).requires_grad_(False).eval()


def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make a step's inputs, the cache included."""
    source = torch.Generator().manual_seed(count)
    return torch.rand(count, WIDTH, generator=source), torch.randperm(ROWS, generator=source)[:count], _cache()


def _cache() -> Tensor:
    return torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))


def compiled(model: nn.Module, partition: str, **given: Any) -> Any:
    """Compile the model cut one way."""
    options = {"ranges": ((2, 64),), "size_one": False, "max_num_batched_tokens": 64, "compiler": "eager"}
    options |= {"passes": (), **given.pop("options", {}), "partition": partition}
    given.setdefault("store", pw.MemoryStore())
    return pw.compile(model, inputs(4), dynamic=DYNAMIC, options=pw.CompileOptions(**options), **given)
