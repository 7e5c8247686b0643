"""Compiled pieces read an opaque body's result as its fake described it: what differs is refused before they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
from piecework.errors import ContractError


@pytest.mark.parametrize("partition", ["fx", "inductor"])
def test_no_piece_reads_what_a_fake_did_not_say(partition: str) -> None:
    store = pw.MemoryStore()
    made = compile_turns(store, compiler="inductor", partition=partition)
    for program in (made, pw.load(store, key=made.key, weights=made.weights)):
        for kind, (_, said) in BROKEN.items():
            x = torch.randn(7, 4)
            with breaking(kind):
                torch.testing.assert_close(program(x), Turns()(x))
                refuse(program, said)
    if partition == "fx":
        x = torch.randn(11, 4)
        for _ in range(5):
            torch.testing.assert_close(made(x), Turns()(x))
        for kind in SEEN_AT_EVERY_CALL:
            with breaking(kind):
                refuse(made, BROKEN[kind][1])


def test_an_operator_inside_a_piece_is_looked_at_at_every_call() -> None:
    program = compile_inside("inductor")
    x = torch.randn(11, 4)
    for _ in range(3):
        torch.testing.assert_close(program(x), Inside()(x))
    for kind in ("dtype", "strides", "rows", "write"):
        with breaking(kind), pytest.raises(ContractError) as raised:
            program(x)
        assert raised.value.message == f"operator `{INSIDE}` {BROKEN[kind][1]}"
    torch.testing.assert_close(program(x), Inside()(x))


def refuse(program: Any, said: str) -> None:
    with pytest.raises(ContractError) as raised:
        program(torch.randn(11, 4))
    assert raised.value.message == f"operator `{NAME}` {said}, at `tokens=11`"
