"""Piece text that runs as it is: equal to the graph it stands for, frees early, and holds to its grammar."""

from __future__ import annotations

import dis
import operator

import pytest
import torch
from torch import fx

from piecework.errors import BindError, CorruptEntry
from piecework.seam.eager_text import prepare_text
from piecework.seam.fx import parse_piece
from piecework.seam.loader import load
from piecework.values.artifact import TEXT, Artifact
from toy_pieces import MIDDLE, PIECES, UNINITIALISED, inputs_for, write_piece


def no_kernels(digest: str) -> object:
    raise AssertionError("text has no kernels")


@pytest.mark.parametrize("name", PIECES)
def test_text_and_graph_give_the_same_bits(name: str) -> None:
    text = PIECES[name]
    called, weights = inputs_for(text, {"s0": 5})
    graph = fx.GraphModule({}, parse_piece(text).graph)
    expected = graph(*called, *weights)
    results = load(Artifact(TEXT, text), kernel_path=no_kernels).bind(weights)(*called)  # type: ignore[arg-type]
    assert len(results) == len(expected)
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.shape == wanted.shape
        assert index in UNINITIALISED[name] or torch.equal(result, wanted)


def test_two_sites_keep_their_own_weights() -> None:
    code = load(Artifact(TEXT, MIDDLE), kernel_path=no_kernels)  # type: ignore[arg-type]
    called, first_weights = inputs_for(MIDDLE, {"s0": 3}, seed=1)
    _, second_weights = inputs_for(MIDDLE, {"s0": 3}, seed=2)
    first, second = code.bind(first_weights), code.bind(second_weights)
    before = first(*called)[4].clone()
    assert not torch.equal(second(*called)[4], before)
    assert torch.equal(first(*called)[4], before)


def test_values_are_freed_after_their_last_use() -> None:
    text = write_piece(
        {"x0": "float32[4] cpu", "w0": "weight float32[4] cpu"},
        "v0 = operator.add(x0, 1)",
        "v1 = operator.add(v0, w0)",
        "v2 = operator.mul(v1, v1)",
        "return (v2,)",
    )
    code, names, weights = prepare_text(text)
    assert weights == ("w0",)
    assert code.co_varnames[: code.co_argcount] == ("x0",)
    steps = [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname in ("STORE_FAST", "DELETE_FAST")]
    assert steps == [
        ("STORE_FAST", "v0"),
        ("STORE_FAST", "v1"),
        ("DELETE_FAST", "v0"),
        ("STORE_FAST", "v2"),
        ("DELETE_FAST", "v1"),
    ]
    assert names["f0_add"] is operator.add


def test_a_wrong_number_of_weights_is_named() -> None:
    with pytest.raises(BindError, match="takes 6 weights, `2` were given"):
        load(Artifact(TEXT, MIDDLE), kernel_path=no_kernels).bind([torch.ones(1)] * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os", "a statement outside its grammar: `import os`"),
        ("v0 = x0", "a statement outside its grammar"),
        ("v0 = open(x0)", "calls something without a qualified name"),
        ("v0 = operator.add((lambda: x0)(), 1)", "calls something without a qualified name"),
        ("v0 = [operator.add(x0, 1) for i in x0]", "a statement outside its grammar"),
    ],
)
def test_other_python_is_refused(body: str, reason: str) -> None:
    text = write_piece({"x0": "float32[4] cpu"}, body, "return (x0,)")
    with pytest.raises(CorruptEntry, match=reason.split(":")[0]):
        load(Artifact(TEXT, text), kernel_path=no_kernels)  # type: ignore[arg-type]
