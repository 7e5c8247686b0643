"""What an opaque body does while it serves is held against what its operator promised, at every size that is met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from broken_bodies import (
    BROKEN,
    INSIDE,
    NAME,
    SEEN_AT_EVERY_CALL,
    Inside,
    Turns,
    breaking,
    compile_inside,
    compile_turns,
)
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


# Where a body is called through torch's dispatcher: what that refuses in its own words, and what it takes.
NOT_BY_TORCH = {"number": "Unable to cast", "one": "Object of type 'Tensor' is not an instance of 'sequence'"}
TAKEN_BY_TORCH = ("three",)


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
    without = (*NOT_BY_TORCH, *TAKEN_BY_TORCH) if road.get("mode") == "trace_once" else ()
    refuse_each(program, without)
    refuse_each(pw.load(store, key=program.key, weights=program.weights), without)


def test_what_the_dispatcher_refuses_is_a_broken_contract_too() -> None:
    program = compile_turns(pw.MemoryStore(), compiler="eager", mode="trace_once")
    for kind, said in NOT_BY_TORCH.items():
        with breaking(kind), pytest.raises(ContractError) as raised:
            program(torch.randn(11, 4))
        assert raised.value.message.startswith(f"operator `{NAME}` gives what its schema does not say: `{said}"), kind
        assert "as many results as the schema says" in raised.value.hint


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
    for kind in ("dtype", "write"):  # of results, and of arguments: what else is looked at is looked at in calls too
        with breaking(kind), pytest.raises(PieceworkError) as raised:
            captured(Turns(), program=program, decode="piecewise", decode_sizes=(11,))
        assert BROKEN[kind][1] in raised.value.message, kind


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


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_operator_inside_a_piece_is_looked_at_at_every_call(compiler: str) -> None:
    program = compile_inside(compiler)
    x, known = torch.randn(11, 4), torch.randn(7, 4)
    for _ in range(3):
        torch.testing.assert_close(program(known), Inside()(known))
    for kind in ("dtype", "strides", "rows", "nothing", "number", "one", "write"):
        with breaking(kind):
            torch.testing.assert_close(program(known), Inside()(known))
            with pytest.raises(ContractError) as raised:
                program(x)
            if kind not in NOT_BY_TORCH:
                assert raised.value.message == f"operator `{INSIDE}` {BROKEN[kind][1]}, at `tokens=11`"
    for _ in range(3):
        torch.testing.assert_close(program(x), Inside()(x))
    for kind in ("dtype", "strides", "rows", "nothing", "number", "one", "write"):
        with breaking(kind), pytest.raises(ContractError) as raised:
            program(x)
        if kind not in NOT_BY_TORCH:
            assert raised.value.message == f"operator `{INSIDE}` {BROKEN[kind][1]}"
    torch.testing.assert_close(program(x), Inside()(x))


def test_a_written_view_of_what_is_declared_written_is_no_fault() -> None:
    library = torch.library.Library("broken_views", "FRAGMENT")
    library.define("into(Tensor x, Tensor(a!) out) -> ()")
    library.impl("into", _copy, "CPU")
    torch.library.register_fake("broken_views::into", lambda x, out: None, lib=library)

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            both = torch.cat([x, x])
            torch.ops.broken_views.into(both[: x.shape[0]], both[x.shape[0] :])
            return both

    program = compile_case(Halves(), rows(5), options={"split_ops": ()})
    for _ in range(2):
        x = torch.randn(7, 4)
        torch.testing.assert_close(program(x), Halves()(x))


def _copy(x: Tensor, out: Tensor) -> None:
    out.copy_(x + 1)
