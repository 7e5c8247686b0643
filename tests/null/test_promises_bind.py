"""Cold and warm meet: what a store gives back binds to the same program as what was put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import piecework as pw


class TwoSizes(nn.Module):
    """Its dimensions are declared in another order than that of their names."""

    def forward(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return rows.sum(0) + columns.sum(0)


class Noting:
    """A compiler whose pieces note for which sizes they were compiled, at each call."""

    def __init__(self) -> None:
        self.called: list[list[int | str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        sizes = [size if isinstance(size, int) else "many" for size in inputs if not isinstance(size, torch.Tensor)]

        def run(*values: Any) -> Any:
            self.called.append(sizes)
            return graph.forward(*values)

        return run


def test_each_choice_of_ranges_has_its_artifact_cold_and_warm(tmp_path: Path) -> None:
    compiler, store = Noting(), pw.DiskStore(tmp_path)
    options = pw.CompileOptions(compiler=compiler, max_num_batched_tokens=64, ranges=((1, 64),))
    dynamic = {"rows": {0: "tokens"}, "columns": {0: "batch"}}
    example = (torch.randn(5, 4), torch.randn(3, 4))
    cold = pw.compile(TwoSizes(), example, dynamic=dynamic, options=options, store=store)
    warm = pw.load(store, key=cold.key, weights={})
    wanted = {(1, 1): [1, 1], (1, 5): [1, "many"], (5, 1): ["many", 1], (5, 7): ["many", "many"]}
    for program in (cold, warm):
        for (tokens, batch), sizes in wanted.items():
            rows, columns = torch.randn(tokens, 4), torch.randn(batch, 4)
            compiler.called.clear()
            assert torch.allclose(program(rows, columns), rows.sum(0) + columns.sum(0))
            assert compiler.called == [sizes]
