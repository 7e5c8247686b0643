"""Attributes that come to be, and writes inside what an attribute holds: told, refused, put back."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import compile_case, rows
from piecework.errors import TraceError
from piecework.events import Recorder, RecordMiss

ops = torch.ops.cases


class Asks(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(ops.fresh(x) - 2) * self.scale
        return y * 2 if hasattr(self, "extra") else y


@pytest.mark.parametrize(
    ("attribute", "value", "shown"),
    [
        ("extra", 1, "`hasattr(model, 'extra')` was `bool:False` and is `bool:True`"),
        ("scale", 3.0, "`'scale' in model.__dict__` was `bool:False` and is `bool:True`"),
        ("act", torch.sigmoid, "`model.act` was `torch:_VariableFunctionsClass.relu` and is"),
    ],
)
def test_an_attribute_that_comes_to_be_is_told_and_is_a_miss(attribute: str, value: object, shown: str) -> None:
    model, store = Asks(), pw.MemoryStore()
    program = compile_case(model, rows(5), store=store)
    assert program.check() == ()
    setattr(model, attribute, value)
    assert any(finding.startswith(shown) for finding in program.check()), program.check()
    recorder = Recorder()
    again = compile_case(model, rows(5), store=store, observer=recorder)
    assert recorder.of(RecordMiss) and torch.equal(again(x := rows(7)[0]), model(x))


class State:
    def __init__(self) -> None:
        self.count = 0

    def __repr__(self) -> str:
        return f"State({self.count})"


class WritesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested: dict[str, list[object]] = {"a": [1.0, {"z": 2.0}]}

    def forward(self, x: Tensor) -> Tensor:
        self.nested["a"][1]["z"] = 3.0  # type: ignore[index]
        return x * 2


class WritesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        self.state.count += 1
        return x * 2


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (WritesInside, r"inside the attribute `nested\['a'\]\[1\]`, a `dict`"),
        (WritesObject, "the attribute `state.count`"),
    ],
)
def test_a_write_inside_an_attribute_is_refused_and_put_back(model: type[nn.Module], what: str) -> None:
    instance = model()
    before = repr(vars(instance))
    with pytest.raises(TraceError, match=rf"forward writes {what} at {re.escape(__file__)}:\d+"):
        compile_case(instance, rows(5))
    assert repr(vars(instance)) == before


ARRAY = numpy.zeros(4, dtype=numpy.float32)


def test_a_write_to_an_array_is_refused_and_not_made_by_the_trace() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ARRAY[1:] = 5
            ARRAY.fill(3)
            return x + torch.from_numpy(ARRAY)

    with pytest.raises(TraceError, match=r"forward writes to the tensor `.*ARRAY` at .*test_cases_attributes.py"):
        compile_case(Writes(), rows(5))
    assert not ARRAY.any()
