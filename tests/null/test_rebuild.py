"""A piece rebuilt from its text: fake inputs, a shape environment of its own, constants for single sizes."""

from __future__ import annotations

import pytest
import torch

from piecework.errors import CompileError
from piecework.seam.rebuild import hint_for, rebuild_piece
from piecework.values.shapes import Range
from toy_pieces import MIDDLE, PIECES, write_piece


@pytest.mark.parametrize("name", PIECES)
def test_every_node_has_a_value_of_the_environment(name: str) -> None:
    piece = rebuild_piece(PIECES[name], {"s0": Range(2, 64)})
    for node in piece.module.graph.nodes:
        if node.op != "output":
            assert "example_value" in node.meta, node
    assert piece.shape_env.guards == []
    (symbol,) = piece.symbols
    (bounds,) = piece.shape_env.var_to_range.values()
    assert (piece.symbols[symbol], int(bounds.lower), int(bounds.upper)) == ("s0", 2, 64)


def test_a_single_size_leaves_no_symbol() -> None:
    piece = rebuild_piece(MIDDLE, {"s0": Range(1, 1)})
    assert piece.symbols == {}
    assert piece.inputs[0] == 1
    assert all(type(size) is int for value in piece.inputs[1:] for size in value.shape)
    assert not piece.shape_env.var_to_range


def test_two_rebuilds_share_nothing() -> None:
    first, second = (rebuild_piece(MIDDLE, {"s0": Range(2, 64)}) for _ in range(2))
    assert first.shape_env is not second.shape_env
    assert first.mode is not second.mode


def test_weights_and_call_parameters_are_told_apart() -> None:
    piece = rebuild_piece(MIDDLE, {"s0": Range(2, 8)})
    assert piece.call_names == ("s0", "x0", "x1", "x2", "x3")
    assert piece.weight_names == ("w0", "w1", "w2", "w3", "w4", "w5")


def test_shapes_and_strides_are_expressions() -> None:
    text = (
        'def piece(\n    s0: "int",\n    s1: "int",\n    x0: "float32[2*s0, s1//2 + 1] strides[s1, 1] cpu",\n'
        '    x1: "float32[max(s0, s1), 3] cpu",\n):\n    v0 = x0.sum()\n    v1 = x1.sum()\n    return (v0, v1)\n'
    )
    piece = rebuild_piece(text, {"s0": Range(3, 3), "s1": Range(9, 9)})
    assert (piece.inputs[2].shape, piece.inputs[2].stride()) == (torch.Size([6, 5]), (9, 1))
    assert piece.inputs[3].shape == torch.Size([9, 3])
    assert rebuild_piece(text, {"s0": Range(2, 30), "s1": Range(2, 9)}).inputs[2].dim() == 2


def test_data_dependent_sizes_have_no_hint() -> None:
    text = write_piece(
        {"u0": "int unbacked", "x0": "float32[u0, 4] cpu"},
        "v0 = operator.add(x0, 1)",
        "return (v0,)",
    )
    piece = rebuild_piece(text, {})
    assert list(piece.symbols.values()) == ["u0"]
    assert piece.hints == {}


def test_a_symbol_without_a_range_is_named() -> None:
    with pytest.raises(CompileError, match="no range is given for symbol `s0`: the box is `s1=2-4`"):
        rebuild_piece(MIDDLE, {"s1": Range(2, 4)})


def test_a_varying_float_does_not_compile() -> None:
    text = write_piece(
        {"x0": "float32[4] cpu", "x1": "float"},
        "v0 = operator.mul(x0, x1)",
        "return (v0,)",
    )
    with pytest.raises(CompileError, match="parameter `x1` is a `float` that varies from call to call"):
        rebuild_piece(text, {})


@pytest.mark.parametrize(
    ("low", "high", "hint"),
    [(1, 1, 1), (2, 64, 16), (2, 8192, 16), (1, 8192, 16), (2, 8, 8), (65, 8192, 729), (4097, 8192, 5793), (7, 7, 7)],
)
def test_the_hint_lies_inside_the_range_and_is_neither_zero_nor_one(low: int, high: int, hint: int) -> None:
    assert hint_for(Range(low, high)) == hint
