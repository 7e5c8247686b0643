"""Drift while serving: one step in so many runs through eager too, and nothing of the step changes by that."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import SPLIT, calls, compile_case, rows
from piecework.api.drift import watch_drift
from piecework.api.programs import make_request
from piecework.errors import OptionError
from piecework.events import Drift, Recorder
from piecework.pipeline import compile_model
from piecework.runtime.program import Program
from planted_compilers import PlantedCompiler, off_by_one_percent


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.cases.put(x @ self.weight) @ self.weight


def drifting(model: Model, every: int) -> tuple[Program, Recorder]:
    """Return a program whose every piece gives 1 % too much."""
    recorder, store = Recorder(), pw.MemoryStore()
    settings = pw.CompileOptions(compiler="eager", split_ops=SPLIT).resolve()
    request = make_request(model, rows(5), {"x": {0: "tokens"}}, settings)
    request = dataclasses.replace(request, compiler=PlantedCompiler(off_by_one_percent), verify=False)
    program = compile_model(request, lambda: {"weight": model.weight}, {}, store, recorder, model=model)
    return watch_drift(program, {}, store, every, recorder), recorder


def test_one_step_in_so_many_is_compared() -> None:
    program, recorder = drifting(Model(), 3)
    results = [program(*rows(7)) for _ in range(7)]
    found = recorder.of(Drift)
    assert [each.step for each in found] == [3, 6]
    assert all(0.005 < each.error < 0.05 and each.output == "result" and each.num_compared == 1 for each in found)
    assert all(result.shape == (7, 4) for result in results)


def test_what_is_right_does_not_drift() -> None:
    recorder, model = Recorder(), Model()
    program = compile_case(model, rows(5), options={"drift_every": 2}, observer=recorder)
    x = rows(9)[0]
    calls.clear()
    with torch.no_grad():
        assert all(torch.equal(program(x), model(x)) for _ in range(4))
    assert [(each.step, each.error) for each in recorder.of(Drift)] == [(2, 0.0), (4, 0.0)]
    assert len(calls) == 4 + 4 + 2  # the model's, the program's, and eager's on two steps


def test_after_a_refresh_eager_reads_the_new_weights() -> None:
    recorder, model = Recorder(), Model()
    program = compile_case(model, rows(5), options={"drift_every": 1}, observer=recorder)
    program(*rows(3))
    model.weight = nn.Parameter(torch.rand(4, 4))
    program.refresh()
    x = rows(3)[0]
    with torch.no_grad():
        assert torch.equal(program(x), model(x))
    assert [each.error for each in recorder.of(Drift)] == [0.0, 0.0]


def test_inputs_that_are_written_are_written_once() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1.0)
            return torch.ops.cases.fresh(x)

    recorder = Recorder()
    program = compile_case(Writes(), rows(5), options={"drift_every": 1}, observer=recorder)
    x = rows(4)[0]
    before = x.clone()
    assert torch.equal(program(x), (before + 1) * 3)
    assert torch.equal(x, before + 1)
    assert [each.error for each in recorder.of(Drift)] == [0.0]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(OptionError, match="`drift_every` is `-1`"):
        pw.CompileOptions(drift_every=-1)
