"""What an opaque body does while it serves is held against what its operator promised, at every size that is met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from broken_bodies import BROKEN, NAME, SEEN_AT_EVERY_CALL, Turns, breaking, compile_turns
from capture_toys import captured
from case_operators import compile_case, rows
from piecework.errors import ContractError, PieceworkError

ROADS = [
    {"compiler": "eager"},
    {"compiler": "eager", "partition": "inductor"},
    {"compiler": "eager", "partition": "none"},
    {"compiler": "eager", "mode": "trace_once"},
    {"compiler": "aot_eager"},
    {"compiler": "aot_eager", "partition": "none"},
]


NOT_BY_TORCH = ("number", "one", "three")  # what its dispatcher refuses itself, where a body is called through it


def refuse_each(program: Any, without: Sequence[str] = ()) -> None:
    """Assert that each broken contract is named at a size that was not met, and that others are served."""
    for kind, (_, said) in BROKEN.items():
        if kind in without:
            continue
        with breaking(kind):
            x = torch.randn(7, 4)
            torch.testing.assert_close(program(x), Turns()(x))
            with pytest.raises(ContractError) as raised:
                program(torch.randn(11, 4))
        assert raised.value.message == f"operator `{NAME}` {said}, at `tokens=11`", kind
        assert raised.value.facts["operator"] == NAME and raised.value.facts["sizes"] == {"tokens": 11}
        assert raised.value.facts["argument"] in ("x", "y", "result", "result 0", "result 1")


@pytest.mark.parametrize("road", ROADS, ids=lambda road: " ".join(road.values()))
def test_a_broken_contract_is_named_before_a_result_is_given(road: dict[str, Any]) -> None:
    store = pw.MemoryStore()
    program = compile_turns(store, **road)
    without = NOT_BY_TORCH if road.get("mode") == "trace_once" else ()
    refuse_each(program, without)
    refuse_each(pw.load(store, key=program.key, weights=program.weights), without)


def test_results_are_looked_at_again_once_a_size_is_known() -> None:
    program = compile_turns(pw.MemoryStore(), compiler="eager")
    x = torch.randn(11, 4)
    for _ in range(5):  # often enough for the form that keeps memory for a size
        program(x)
    for kind in SEEN_AT_EVERY_CALL:
        with breaking(kind), pytest.raises(ContractError) as raised:
            program(x)
        assert raised.value.message == f"operator `{NAME}` {BROKEN[kind][1]}, at `tokens=11`"
    torch.testing.assert_close(program(x), Turns()(x))


def test_a_body_that_was_handed_in_is_held_to_the_operator_s_fake() -> None:
    store = pw.MemoryStore()
    program = compile_turns(store, compiler="eager")
    bodies = {NAME: lambda x, y: (x.double(), y + 1)}
    loaded = pw.load(store, key=program.key, weights=program.weights, ops=bodies)
    with pytest.raises(ContractError, match="of dtype `float64`, where its fake says `float32`, at `tokens=5`"):
        loaded(torch.randn(5, 4))


def test_a_size_is_looked_at_before_it_is_captured() -> None:
    program = compile_turns(pw.MemoryStore(), compiler="eager")
    for kind, (_, said) in BROKEN.items():
        with breaking(kind), pytest.raises(PieceworkError) as raised:
            captured(Turns(), program=program, decode="piecewise", decode_sizes=(11,))
        assert said in raised.value.message, kind


def test_an_argument_that_was_written_is_put_back() -> None:
    program = compile_case(HandsOver(), rows(5), options={"split_ops": (NAME,)})
    x = torch.randn(11, 4)
    before = x.clone()
    with breaking("write"), pytest.raises(ContractError, match="writes its argument `y`"):
        program(x)
    assert torch.equal(x, before)


class HandsOver(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.ops.broken_bodies.turn(x + 1, x)
        return one + two


class Inside(nn.Module):
    """Calls an operator that no graph is cut at."""

    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.ops.broken_inside.turn(x * 2, x * 3)
        return one + two


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_operator_inside_a_piece_is_looked_at_when_a_size_is_met(compiler: str) -> None:
    library = torch.library.Library("broken_inside", "FRAGMENT")
    library.define("turn(Tensor x, Tensor y) -> (Tensor, Tensor)")
    library.impl("turn", lambda x, y: (x * 2, (y + 1).t().contiguous().t() if len(x) == 11 else y + 1), "CPU")
    fake = lambda x, y: (torch.empty_like(x), torch.empty_like(y))  # noqa: E731
    torch.library.register_fake("broken_inside::turn", fake, lib=library)
    program = compile_case(Inside(), rows(5), options={"compiler": compiler, "split_ops": ()})
    x = torch.randn(7, 4)
    torch.testing.assert_close(program(x), Inside()(x))
    with pytest.raises(
        ContractError, match=r"result 1 of strides `\[1, 11\]`, where its fake says `\[4, 1\]`, at `tok"
    ):
        program(torch.randn(11, 4))
