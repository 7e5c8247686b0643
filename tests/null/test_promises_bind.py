"""Cold and warm meet: what a store gives back binds to the same program as what was put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.errors import ArtifactMissing, BindError
from piecework.events import ArtifactCompiled, Recorder, RecordMiss
from piecework.store.protocol import ARTIFACT


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


class Scaled(nn.Module):
    """Two of it differ in a number that their pieces' texts hold."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.factor = factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale * self.factor


def compile_scaled(model: Scaled, store: Any, seen: Recorder | None = None) -> pw.Program:
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=8, ranges=((1, 8),), size_one=False)
    rows = torch.ones(3, model.scale.shape[0])
    return pw.compile(model, (rows,), dynamic={"rows": {0: "n"}}, options=options, store=store, observer=seen)


def test_an_artifact_under_a_wrong_key_is_rejected(tmp_path: Path) -> None:
    """As if every piece had one key: what stands under it is of another piece, and its factors say so."""
    store = pw.DiskStore(tmp_path)
    doubles, triples, seen = Scaled(4, 2.0), Scaled(4, 3.0), Recorder()
    program = compile_scaled(doubles, store)
    compile_scaled(triples, store)
    first, second = store.list_records(ARTIFACT)
    kept = {key: store.read_record(ARTIFACT, key) for key in (first, second)}
    store.write_record(ARTIFACT, first, kept[second])
    store.write_record(ARTIFACT, second, kept[first])
    fresh = pw.DiskStore(tmp_path)
    with pytest.raises(ArtifactMissing, match="its key was made of other content"):
        pw.load(fresh, key=program.key, weights=doubles.state_dict())
    again = compile_scaled(doubles, fresh, seen)
    assert torch.equal(again(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    assert "is not in store" in seen.of(RecordMiss)[0].reason  # it was set aside
    assert len(seen.of(ArtifactCompiled)) == 1
    loaded = pw.load(fresh, key=program.key, weights=doubles.state_dict())
    assert torch.equal(loaded(torch.ones(3, 4)), torch.full((3, 4), 2.0))


def test_weights_of_another_shape_are_rejected() -> None:
    store = pw.MemoryStore()
    program = compile_scaled(Scaled(4, 2.0), store)
    with pytest.raises(BindError, match=r"weight `scale` is `float32\[6\] cpu`, .* compiled for `float32\[4\] cpu`"):
        pw.load(store, key=program.key, weights=Scaled(6, 2.0).state_dict())
