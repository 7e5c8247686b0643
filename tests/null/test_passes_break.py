"""Passes that break a graph in every way: each is named, whatever it writes into metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import piecework as pw
from piecework.errors import PassError
from piecework.values.graph import TracedGraph
from piecework.values.rewriting import FunctionalPiece, Rewritten

_library = torch.library.Library("break_test", "FRAGMENT")
_library.define("mix(Tensor x) -> Tensor")
_library.impl("mix", lambda x: x + x.sum(0), "CPU")
torch.library.register_fake("break_test::mix", torch.empty_like, lib=_library)
aten = torch.ops.aten


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.break_test.mix(self.first(x).pow(2))
        state.mul_(2)
        z = self.second(y) + state.sum()
        return z, z.sin().half()


def build(function: Callable[[Any], Any], runs_on: str = "graph", compiler: str = "eager") -> Any:
    torch.manual_seed(0)
    options = pw.CompileOptions(
        compiler=compiler, passes=(pw.graph_pass("culprit", runs_on=runs_on)(function),),
        split_ops=("break_test::mix",), ranges=((2, 16),), size_one=False, max_num_batched_tokens=16,
    )  # fmt: skip
    model = Writes().eval().requires_grad_(False)
    given = (torch.rand(5, 8), torch.ones(3))
    return pw.compile(model, given, dynamic={"x": {0: "tokens"}}, options=options, store=pw.MemoryStore())


def call_of(traced: TracedGraph, name: str) -> fx.Node:
    return next(
        node for node in traced.graph.nodes
        if node.op.startswith("call") and name == str(getattr(node.target, "__name__", node.target))
    )  # fmt: skip


def copied_metadata(traced: TracedGraph) -> Rewritten:
    output = traced.graph.output_node()
    first, second = output.args[0]  # type: ignore[misc]
    with traced.graph.inserting_before(output):
        half = traced.graph.call_method("half", (first,))
    half.meta = dict(first.meta)
    output.args = ((half, second),)
    return Rewritten(traced)


def written_metadata(traced: TracedGraph) -> Rewritten:
    node, first = call_of(traced, "half"), call_of(traced, "sin")
    node.target, node.meta = "double", {**first.meta, "spec": node.meta["spec"]}
    return Rewritten(traced)


def another_call(traced: TracedGraph) -> Rewritten:
    call_of(traced, "half").target = "double"
    return Rewritten(traced)


def another_argument(traced: TracedGraph) -> Rewritten:
    call_of(traced, "sin").args = (call_of(traced, "sum"),)
    return Rewritten(traced)


def one_result_less(traced: TracedGraph) -> Rewritten:
    output = traced.graph.output_node()
    output.args = (output.args[0][:1],)  # type: ignore[index]
    return Rewritten(traced)


def an_input_for_a_result(traced: TracedGraph) -> Rewritten:
    output = traced.graph.output_node()
    x = next(n for n in traced.graph.find_nodes(op="placeholder") if traced.bindings[n.name].kind == "input")
    output.args = ((x, output.args[0][1]),)  # type: ignore[index]
    return Rewritten(traced)


def no_write(traced: TracedGraph) -> Rewritten:
    node = call_of(traced, "mul_")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    traced.graph.erase_node(node)
    return Rewritten(traced)


def later_write(traced: TracedGraph) -> Rewritten:
    node = call_of(traced, "mul_")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    traced.graph.output_node().prepend(node)
    return Rewritten(traced)


def new_input(traced: TracedGraph) -> Rewritten:
    with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
        traced.graph.placeholder("extra")
    return Rewritten(traced)


def stranger(traced: TracedGraph) -> Rewritten:
    call_of(traced, "sin").args = (fx.Graph().placeholder("stranger"),)
    return Rewritten(traced)


def two_outputs(traced: TracedGraph) -> Rewritten:
    traced.graph.output(traced.graph.output_node().args[0])
    return Rewritten(traced)


def no_output(traced: TracedGraph) -> Rewritten:
    traced.graph.erase_node(traced.graph.output_node())
    return Rewritten(traced)


def bare_result(traced: TracedGraph) -> Rewritten:
    output = traced.graph.output_node()
    output.args = (output.args[0][0],)  # type: ignore[index]
    return Rewritten(traced)


def local_function(traced: TracedGraph) -> Rewritten:
    node = call_of(traced, "sin")
    node.op, node.target = "call_function", lambda x: x
    return Rewritten(traced)


def another_graph(traced: TracedGraph) -> Rewritten:
    """Copy the graph, with all metadata, and change the copy."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    return another_call(replace(traced, graph=graph))


BREAKS: list[tuple[Callable[[TracedGraph], Rewritten], str]] = [
    (copied_metadata, "result 0 is `float16[tokens, 8] cpu`, it was `float32[tokens, 8] cpu`"),
    (written_metadata, "result 1 is `float64[tokens, 8] cpu`, it was `float16[tokens, 8] cpu`"),
    (another_call, "result 1 is `float64[tokens, 8] cpu`, it was `float16[tokens, 8] cpu`"),
    (another_argument, "result 1 is `float16[] cpu`, it was `float16[tokens, 8] cpu`"),
    (another_graph, "result 1 is `float64[tokens, 8] cpu`, it was `float16[tokens, 8] cpu`"),
    (one_result_less, "the graph has 1 results, it had 2"),
    (an_input_for_a_result, "result 0 is `l_kwargs_x_`, it was a value of its own"),
    (no_write, "input `l_kwargs_state_` is no longer written in place"),
    (later_write, "`sum_1` came after `mul_`, one of which writes what both touch"),
    (new_input, "input `extra` has no binding"),
    (stranger, "the graph is not well formed: Argument 'stranger' of Node 'sin' does not belong to this Graph"),
    (two_outputs, "it has 2 outputs, where one is due, as the last node"),
    (no_output, "it has 0 outputs, where one is due, as the last node"),
    (bare_result, "its output is `z`, and no list of results"),
    (local_function, "node `sin` calls what has no importable name"),
    (lambda traced: Rewritten(traced, 3), "its matches or misses are `3`, and not lines of text"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("function", "reason"), BREAKS)
def test_a_pass_that_breaks_a_graph_is_named(function: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(PassError) as caught:
        build(function)
    assert reason in caught.value.message
    assert caught.value.facts["pass"] == "culprit"


def test_what_a_pass_says_of_its_nodes_is_not_believed_where_it_is_right_either() -> None:
    """A value's metadata on a call that gives something like it, and a call that is edited in place."""

    def edit(traced: TracedGraph) -> Rewritten:
        node = call_of(traced, "pow")
        with traced.graph.inserting_before(node):
            wide = traced.graph.call_method("double", (node.args[0],))
            back = traced.graph.call_method("float", (wide,))
        wide.meta = dict(node.meta)
        node.args = (back, 2)
        return Rewritten(traced, ("wide",))

    program = build(edit)
    x, state = torch.rand(7, 8), torch.ones(3)
    torch.manual_seed(0)
    for found, wanted in zip(program(x, state.clone()), Writes()(x, state), strict=True):
        torch.testing.assert_close(found, wanted)


# ------------------------------------------------------------------------------------------------------- on a piece


def piece_copied(piece: FunctionalPiece) -> Rewritten:
    output = piece.graph.output_node()
    first, *rest = output.args[0]  # type: ignore[misc]
    with piece.graph.inserting_before(output):
        half = piece.graph.call_function(aten.to.dtype, (first, torch.float16))
    half.meta = dict(first.meta)
    output.args = ([half, *rest],)
    return Rewritten(piece)


def piece_edited(piece: FunctionalPiece) -> Rewritten:
    for node in piece.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        node.target, node.args = aten.isnan.default, node.args[:1]
    return Rewritten(piece)


def piece_unended(piece: FunctionalPiece) -> Rewritten:
    piece.graph.erase_node(piece.graph.output_node())
    return Rewritten(piece)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (piece_copied, "result 0 is `float16["),
        (piece_edited, "result 0 is `bool["),
        (piece_unended, "it has 0 outputs, where one is due"),
    ],
)
def test_a_pass_that_breaks_a_piece_is_named(function: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(PassError) as caught:
        build(function, "piece", "aot_eager")
    assert reason in caught.value.message
    assert ("which crosses the cut" in caught.value.message) == ("result 0" in reason)
