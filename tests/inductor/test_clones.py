"""An input that is written in place is written where it lies: no compiled text makes room for a second one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework.events import FallBack, Recorder
from piecework.store.protocol import ARTIFACT

WRITE = "clones_test::write"
PAGES, WIDTH = 96, 24  # of the cache: sizes that nothing else in the model has

_library = torch.library.Library("clones_test", "FRAGMENT")
_library.define("write(Tensor rows, Tensor slots, Tensor(a!) cache) -> ()")


def _write(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    cache.index_add_(0, slots, rows)


_library.impl("write", _write, "CPU")
torch.library.register_fake("clones_test::write", lambda rows, slots, cache: None, lib=_library)


class Writes(nn.Module):
    """Writes rows of a cache by an operator and by torch's own calls, and reads it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        cache[slots] = self.key(x)
        torch.ops.clones_test.write(self.query(x), slots, cache)
        return cache[slots] * self.query(x)


def whole_copies(store: Any) -> int:
    """Count the places at which stored texts allocate or clone something of the cache's whole size."""
    texts = [store.read_blob(store.read_record(ARTIFACT, key)["text"]).decode() for key in store.list_records(ARTIFACT)]
    assert texts
    sizes = re.compile(rf"\({PAGES}, {WIDTH}\)|\(({PAGES * WIDTH}), ?\)")
    lines = [line for text in texts for line in text.splitlines() if sizes.search(line)]
    return sum("empty" in line or "clone" in line or "alloc" in line for line in lines)


@pytest.mark.parametrize(
    ("partition", "split_ops_only"),
    [("fx", (WRITE,)), ("fx", ()), ("inductor", (WRITE,)), ("none", (WRITE,))],
    ids=["fx", "fx without a cut", "inductor", "none"],
)  # fmt: skip
def test_no_written_input_is_cloned(partition: str, split_ops_only: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, store, recorder = Writes().eval(), pw.MemoryStore(), Recorder()
    options = pw.CompileOptions(
        compiler="inductor", partition=partition, split_ops_only=split_ops_only, ranges=((2, 32),), size_one=False,
        max_num_batched_tokens=32, passes=("no_ops", "merge_linears_everywhere"),
    )  # fmt: skip
    example = (torch.rand(4, 8), torch.arange(4), torch.zeros(PAGES, WIDTH))
    dynamic = {"x": {0: "tokens"}, "slots": {0: "tokens"}}
    program = pw.compile(model, example, dynamic=dynamic, options=options, store=store, observer=recorder)
    assert recorder.of(FallBack) == []
    x, slots = torch.rand(7, 8), torch.tensor([5, 1, 90, 33, 2, 8, 7])
    cache = torch.rand(PAGES, WIDTH)
    right, place = cache.clone(), cache.data_ptr()
    with torch.no_grad():
        wanted = model(x, slots, right)
    torch.testing.assert_close(program(x, slots, cache), wanted)
    torch.testing.assert_close(cache, right)
    assert cache.data_ptr() == place
    assert whole_copies(store) == 0


def test_the_count_sees_a_copy() -> None:
    """A model that does copy its cache, so that a count of none says something."""

    class Copies(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            return cache.sin() @ x.T

    store = pw.MemoryStore()
    options = pw.CompileOptions(compiler="inductor", ranges=((2, 32),), size_one=False, max_num_batched_tokens=32)
    example = (torch.rand(4, WIDTH), torch.zeros(PAGES, WIDTH))
    pw.compile(Copies(), example, dynamic={"x": {0: "tokens"}}, options=options, store=store)
    assert whole_copies(store) > 0
