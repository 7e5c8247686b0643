"""What is given to the public calls is of the kind that they take, or is told what to give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecework as pw
from piecework.errors import InputError, OptionError


class Double(torch.nn.Module):
    """Twice its input, given by name."""

    def forward(self, *, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return 2 * x if bias is None else 2 * x + bias


ROWS = {"x": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"model": Double}, "`model` is `<class", "give an object: `Double(...)`"),
        ({"model": 3}, "`model` is `3`", "give a `torch.nn.Module`"),
        ({"example_inputs": torch.ones(3)}, "`example_inputs` is a tensor of shape (3,)", "give a tuple"),
        ({"example_inputs": [torch.ones(3)]}, "`example_inputs` is a tensor of shape (3,)", "give a tuple"),
        ({"example_inputs": None}, "`example_inputs` is `None`", "give a tuple"),
        ({"options": {}}, "`options` is `{}`", "pw.CompileOptions(...)"),
        ({"store": "some/folder"}, "`store` is `'some/folder'`", "give `pw.DiskStore('some/folder')`"),
        ({"store": 3}, "`store` is `3`", "pw.MemoryStore()"),
        ({"ops": "a::b"}, "`ops` is `'a::b'`", "give a dictionary"),
    ],
)
def test_compile_tells_what_to_give(given: dict[str, Any], message: str, hint: str) -> None:
    arguments = {"model": Double(), "example_inputs": ROWS, "store": pw.MemoryStore(), **given}
    with pytest.raises(OptionError) as caught:
        pw.compile(arguments.pop("model"), arguments.pop("example_inputs"), **arguments)
    assert message in caught.value.message and hint in caught.value.hint


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"store": "some/folder"}, "`store` is `'some/folder'`", "give `pw.DiskStore('some/folder')`"),
        ({"store": None}, "`store` is `None`", "pw.MemoryStore()"),
        ({"key": 3}, "`key` is `3`", "give a program's key as text"),
        ({"key": ""}, "`key` is `''`", "give a program's key as text"),
        ({"weights": None}, "`weights` is `None`", "give a state dictionary"),
        ({"weights": torch.ones(2)}, "`weights` is a tensor of shape (2,)", "give a state dictionary"),
        ({"ops": 3}, "`ops` is `3`", "give a dictionary"),
    ],
)
def test_load_tells_what_to_give(given: dict[str, Any], message: str, hint: str) -> None:
    arguments = {"store": pw.MemoryStore(), "key": "a.b", "weights": {}, **given}
    with pytest.raises(OptionError) as caught:
        pw.load(arguments.pop("store"), **arguments)
    assert message in caught.value.message and hint in caught.value.hint


def test_a_parameter_by_name_alone_stays_so() -> None:
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=8)
    program = pw.compile(
        Double(), [ROWS, {**ROWS, "bias": torch.ones(2)}], dynamic={"x": {0: "rows"}}, options=options,
        store=pw.MemoryStore(),
    )  # fmt: skip
    for one in (program, *program.variants):
        with pytest.raises(InputError, match="takes 0 so\nhint: it takes `x`, `bias` by name"):
            one(torch.ones(4, 2))
    assert torch.equal(program(x=torch.ones(4, 2)), torch.full((4, 2), 2.0))
    assert torch.equal(program(bias=torch.ones(2), x=torch.ones(4, 2)), torch.full((4, 2), 3.0))


def test_an_unknown_split_operator_is_told_before_the_trace() -> None:
    class Untraceable(Double):
        def forward(self, *, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            raise AssertionError("the trace has begun")

    options = pw.CompileOptions(compiler="eager", split_ops=("piecework::atention",))
    with pytest.raises(OptionError, match="split operator `piecework::atention` is not registered"):
        pw.compile(Untraceable(), ROWS, options=options, store=pw.MemoryStore())


class Scaled(torch.nn.Module):
    """Its input divided by a number, and times another that has a default."""

    def forward(self, x: torch.Tensor, zero: float, times: int = 1) -> torch.Tensor:
        return x / zero * times


def test_numbers_that_compare_equal_are_told_apart() -> None:
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=8)
    given = (torch.ones(3, 2), 0.0)
    program = pw.compile(Scaled(), given, dynamic={"x": {0: "rows"}}, options=options, store=pw.MemoryStore())
    assert torch.equal(program(torch.ones(4, 2), 0.0), torch.full((4, 2), torch.inf))
    with pytest.raises(InputError, match="argument `zero` is `-0.0`"):
        program(torch.ones(4, 2), -0.0)
    assert torch.equal(program(torch.ones(4, 2), 0.0, 1), torch.full((4, 2), torch.inf))
    for times in (1.0, True):
        with pytest.raises(InputError, match="argument `times`"):
            program(torch.ones(4, 2), 0.0, times)
