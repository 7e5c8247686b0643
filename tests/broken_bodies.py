"""An opaque operator whose body breaks its contract on demand, and a model that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import piecework as pw
from piecework.values.declaration import split_op

NAME = "broken_bodies::turn"
INSIDE = "broken_bodies::inside"  # the same, where no graph is cut
KEPT = 8  # sizes up to this one keep the contract, whatever is broken
Body = Callable[[Tensor, Tensor], Any]
_library = torch.library.Library("broken_bodies", "FRAGMENT")
_chosen: list[Body] = []


def _turn(x: Tensor, y: Tensor) -> Any:
    """Return two tensors like `x`, or what was chosen instead."""
    body = _chosen[-1] if _chosen and len(x) > KEPT else good
    return body(x, y)


def good(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the contract."""
    return x * 2, y + 1


for _name in (NAME, INSIDE):
    _short = _name.rpartition(":")[2]
    _library.define(f"{_short}(Tensor x, Tensor y) -> (Tensor, Tensor)")
    _library.impl(_short, _turn, "CPU")
    torch.library.register_fake(_name, lambda x, y: (torch.empty_like(x), torch.empty_like(y)), lib=_library)
split_op(NAME, capture="always")(_turn)


def _writes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    found = good(x, y)
    y.add_(100)
    return found


def _reshapes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    found = good(x, y)
    y.unsqueeze_(0)
    return found


def _moves(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    found = good(x, y)
    y.set_(y.clone())
    return found


def _gives_twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([x[0], *(x + y)])
    return both[1:], both[:-1]  # rows that overlap


# What a body does beyond `KEPT` rows, and what is said of it at `tokens=11`.
BROKEN: dict[str, tuple[Body, str]] = {
    "dtype": (lambda x, y: (x.double(), y + 1), "gives a result 0 of dtype `float64`, where its fake says `float32`"),
    "strides": (
        lambda x, y: (x * 2, (y + 1).t().contiguous().t()),
        "gives a result 1 of strides `[1, 11]`, where its fake says `[4, 1]`",
    ),
    "shape": (lambda x, y: (x[:, :2] * 2, y + 1), "gives a result 0 of shape `[11, 2]`, where its fake says `[11, 4]`"),
    "rows": (lambda x, y: (x * 2, y[1:] + 1), "gives a result 1 of shape `[10, 4]`, where its fake says `[11, 4]`"),
    "rank": (
        lambda x, y: (x[None] * 2, y + 1),
        "gives a result 0 of shape `[1, 11, 4]`, where its fake says `[11, 4]`",
    ),
    "device": (
        lambda x, y: (torch.empty_like(x, device="meta"), y + 1),
        "gives a result 0 of device `meta`, where its fake says `cpu`",
    ),
    "nothing": (lambda x, y: (None, y + 1), "gives a result 0 of kind `NoneType`, where its fake says `a tensor`"),
    "number": (lambda x, y: (x * 2, 3), "gives a result 1 of kind `int`, where its fake says `a tensor`"),
    "one": (lambda x, y: x * 2, "gives `1` results, where its fake says `2`"),
    "three": (lambda x, y: (x + 1, x + 2, x + 3), "gives `3` results, where its fake says `2`"),
    "sparse": (
        lambda x, y: ((x * 2).to_sparse(), y + 1),
        "gives a result 0 of layout `sparse_coo`, where its fake says `strided`",
    ),
    "shared": (_gives_twice, "gives its results 0 and 1 the same memory"),
    "moved": (_moves, "gives its argument `y` other memory"),
    "itself": (lambda x, y: (x, y + 1), "gives back its argument `x`, or a view of it, as its result 0"),
    "view": (lambda x, y: (x * 2, y.view(-1, 4)), "gives back its argument `y`, or a view of it, as its result 1"),
    "write": (_writes, "writes its argument `y`, which its schema does not say"),
    "layout": (
        _reshapes,
        "leaves its argument `y` as `float32[1, 11, 4] strides[44, 4, 1]`, which was `float32[11, 4] strides[4, 1]`",
    ),
}
SEEN_AT_EVERY_CALL = (
    "dtype",
    "strides",
    "shape",
    "rows",
    "rank",
    "device",
    "nothing",
    "number",
    "one",
    "three",
    "sparse",
)


@contextmanager
def breaking(kind: str) -> Iterator[None]:
    """Have the operator's body break its contract beyond `KEPT` rows, until the block ends."""
    _chosen.append(BROKEN[kind][0])
    try:
        yield
    finally:
        _chosen.pop()


class Turns(nn.Module):
    """Two layers with the operator between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        one, two = torch.ops.broken_bodies.turn(y, y * 3)
        three, four = torch.ops.broken_bodies.turn(torch.relu(one) + 1, two * 2)
        return three + four


def compile_turns(store: Any, **options: Any) -> Any:
    """Compile the model for 2 to 16 rows."""
    given = {"ranges": ((2, 16),), "size_one": False, "max_num_batched_tokens": 16, **options}
    return pw.compile(
        Turns(), (torch.randn(5, 4),), dynamic={"x": {0: "tokens"}}, options=pw.CompileOptions(**given), store=store
    )


class Inside(nn.Module):
    """Calls an operator that no graph is cut at."""

    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.ops.broken_bodies.inside(x * 2, x * 3)
        return one + two * 2


def compile_inside(compiler: str) -> Any:
    """Compile that model for 2 to 16 rows."""
    given = {"ranges": ((2, 16),), "size_one": False, "max_num_batched_tokens": 16, "compiler": compiler}
    return pw.compile(
        Inside(), (torch.randn(5, 4),), dynamic={"x": {0: "tokens"}}, options=pw.CompileOptions(**given),
        store=pw.MemoryStore(),
    )  # fmt: skip
