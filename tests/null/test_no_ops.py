"""No-op elimination takes what gives the very tensor it was given, and leaves what only looks so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecework as pw
from piecework.passes import apply_passes, resolve_passes
from piecework.stages.trace import trace

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Spelled(nn.Module):
    """One line between two sums, so that nothing is an input or a result by itself."""

    def __init__(self, line: Any) -> None:
        super().__init__()
        self.line = line

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x + 1) * 2


NOTHING = {
    "to its dtype": lambda y: y.to(torch.float32),
    "float": lambda y: y.float(),
    "type_as": lambda y: y.type_as(y),
    "contiguous": lambda y: y.contiguous(),
    "view of all": lambda y: y.view(-1, 8),
    "reshape of all": lambda y: y.reshape(y.shape),
    "all items": lambda y: y[:],
    "ellipsis": lambda y: y[...],
    "dropout off": lambda y: F.dropout(y, 0.5, training=False),
    "dropout of none": lambda y: F.dropout(y, 0.0, training=True),
}
SOMETHING = {
    "another dtype": lambda y: y.to(torch.float64),
    "there and back": lambda y: y.to(torch.float16).to(torch.float32),  # it rounds
    "a copy": lambda y: y.to(torch.float32, copy=True),
    "contiguous of a view": lambda y: y.t().contiguous(),
    "another view": lambda y: y.view(-1, 4, 2).sum(-1),
    "some items": lambda y: y[:, 1:],
    "written": lambda y: y.clone().mul_(3) + y,
    "resized in place": lambda y: y.view(-1, 8).unsqueeze_(0),
}


def eliminated(line: Any) -> tuple[Any, tuple[str, ...]]:
    traced = trace(Spelled(line).eval(), {"x": ROWS.clone()}, {"x": {0: "tokens"}})
    graph, (step,) = apply_passes(traced, resolve_passes(("no_ops",)))
    return graph, step.report.matches


@pytest.mark.parametrize("line", NOTHING.values(), ids=NOTHING)
def test_a_call_that_gives_its_argument_goes(line: Any) -> None:
    graph, matches = eliminated(line)
    assert len(matches) == 1
    assert sum(node.op.startswith("call") and not node.meta.get("number") for node in graph.graph.nodes) == 2


@pytest.mark.parametrize("line", SOMETHING.values(), ids=SOMETHING)
def test_a_call_that_does_something_stays(line: Any) -> None:
    assert eliminated(line)[1] == ()


@pytest.mark.parametrize("line", [NOTHING["view of all"], NOTHING["float"], SOMETHING["written"]])
def test_a_write_through_what_was_left_out_is_seen_as_before(line: Any) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            line(y).add_(5)
            return y * 2

    options = pw.CompileOptions(compiler="eager", passes=("no_ops",), max_num_batched_tokens=16, ranges=((1, 16),))
    program = pw.compile(Writes(), {"x": ROWS}, dynamic={"x": {0: "tokens"}}, options=options, store=pw.MemoryStore())
    torch.testing.assert_close(program(x=ROWS), Writes()(ROWS), rtol=0, atol=0)
