"""The pass framework: passes run, are counted, linted and keyed; what breaks a graph is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from piecework.errors import OptionError, PassError
from piecework.events import PassDone, Recorder
from piecework.passes import resolve_passes
from piecework.passes.declare import digest_of_code
from piecework.store.protocol import ARTIFACT, PROGRAM
from piecework.values.graph import TracedGraph
from piecework.values.rewriting import FunctionalPiece, GraphPass, Rewritten

_library = torch.library.Library("passes_test", "FRAGMENT")
_library.define("mix(Tensor x) -> Tensor")
_library.impl("mix", lambda x: x + x.sum(0), "CPU")
torch.library.register_fake("passes_test::mix", torch.empty_like, lib=_library)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.passes_test.mix(self.first(x).pow(2))
        return self.second(y).pow(2)


DYNAMIC = {"x": {0: "tokens"}}


def compile_with(
    *passes: Any, compiler: str = "eager", model: nn.Module | None = None, store: Any = None
) -> tuple[Any, Recorder, Any]:
    torch.manual_seed(0)
    recorder, store = Recorder(), store or pw.MemoryStore()
    options = pw.CompileOptions(
        compiler=compiler, passes=passes, split_ops=("passes_test::mix",), ranges=((1, 32),), max_num_batched_tokens=32
    )
    model = model or Squares().eval()
    program = pw.compile(model, (torch.rand(5, 8),), dynamic=DYNAMIC, options=options, store=store, observer=recorder)
    x = torch.rand(9, 8)
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))
    return program, recorder, store


def rewrite_squares(traced: TracedGraph) -> Rewritten:
    found = []
    for node in list(traced.graph.nodes):
        if node.op == "call_method" and node.target == "pow":
            with traced.graph.inserting_before(node):
                product = traced.graph.call_method("mul", (node.args[0], node.args[0]))
            node.replace_all_uses_with(product)
            traced.graph.erase_node(node)
            found.append(node.name)
    return Rewritten(traced, tuple(found))


def squares(**words: Any) -> GraphPass:
    return pw.graph_pass("squares", **words)(rewrite_squares)


def test_a_pass_of_the_users_rewrites_is_counted_and_kept() -> None:
    program, recorder, store = compile_with(squares(expects_match=True))
    (done,) = recorder.of(PassDone)
    assert (done.name, done.version, done.matches, done.note) == ("squares", 1, 2, "")
    assert done.end_ns > done.start_ns
    record = store.read_record(PROGRAM, program.key)
    (kept,) = record["notes"]["passes"]
    assert (kept["matches"], kept["places"]) == (2, ["pow_1", "pow_2"])
    texts = [store.read_blob(piece["text"]).decode() for piece in record["pieces"]]
    assert all(".mul(" in text and "pow" not in text for text in texts)
    factor = record["factors"]["code"]["passes"][0]  # those that operators ask for come after
    assert factor == {"name": "squares", "version": 1, "digest": digest_of_code(rewrite_squares)}


def test_a_warm_start_with_the_same_pass_runs_none() -> None:
    first, _, store = compile_with(squares())
    again, recorder, _ = compile_with(squares(), store=store)
    assert (again.key, recorder.of(PassDone)) == (first.key, [])
    other, recorder, _ = compile_with(squares(version=2), store=store)
    assert other.key != first.key
    assert len(recorder.of(PassDone)) == 1


def _made(text: str) -> Callable[..., Any]:
    space: dict[str, Any] = {"__name__": "edited"}
    exec(text, space)
    return space["function"]  # type: ignore[no-any-return]


def test_an_edit_changes_the_digest_and_a_comment_does_not() -> None:
    plain = "def aid(x):\n    return x + 1\ndef function(x):\n    return aid(x)\n"
    one = digest_of_code(_made(plain))
    assert digest_of_code(_made(plain.replace("return aid", "# why\n    return aid"))) == one
    assert digest_of_code(_made(plain.replace("x + 1", "x + 2"))) != one
    assert digest_of_code(_made(plain.replace("return aid(x)", "return aid(x) * 2"))) != one
    assert digest_of_code(_made("LIMIT = 3\ndef function(x):\n    return LIMIT\n")) != digest_of_code(
        _made("LIMIT = 4\ndef function(x):\n    return LIMIT\n")
    )


def test_a_pass_that_matches_nothing_says_so_where_it_is_expected(caplog: pytest.LogCaptureFixture) -> None:
    nothing = pw.graph_pass("nothing", expects_match=True)(lambda traced: Rewritten(traced))
    _, recorder, _ = compile_with(nothing)
    (done,) = recorder.of(PassDone)
    assert done.note == "pass `nothing` matched nothing, where its author expects a match"
    with caplog.at_level(logging.WARNING, "piecework"):
        options = pw.CompileOptions(compiler="eager", passes=(nothing,))
        pw.compile(nn.Linear(4, 4), (torch.rand(2, 4),), options=options, store=pw.MemoryStore())
    assert "pass `nothing` matched nothing" in caplog.text


# ------------------------------------------------------------------------------------------------ what breaks a graph


def _halve_result(traced: TracedGraph) -> Rewritten:
    output = traced.graph.output_node()
    with traced.graph.inserting_before(output):
        half = traced.graph.call_method("half", (output.args[0][0],))  # type: ignore[index]
    output.args = ((half,),)
    return Rewritten(traced, ("half",))


def _use_before_definition(traced: TracedGraph) -> Rewritten:
    calls = [node for node in traced.graph.nodes if node.op.startswith("call")]
    calls[0].append(calls[-1])
    calls[0].prepend(calls[-1])
    return Rewritten(traced, ("moved",))


def _wrong_size(traced: TracedGraph) -> Rewritten:
    node = next(node for node in traced.graph.nodes if node.target == "pow")
    with traced.graph.inserting_before(node):
        node.args = (traced.graph.call_method("view", (node.args[0], 3, 3)), 2)
    return Rewritten(traced, ("view",))


def _assume_a_size(traced: TracedGraph) -> Rewritten:
    """Decide by the size that the trace happened to have."""
    node = next(node for node in traced.graph.nodes if node.target == "pow")
    assert node.meta["example_value"].shape[0] == 13  # the decision is the condition
    return Rewritten(traced)


def _write_an_input(traced: TracedGraph) -> Rewritten:
    node = next(node for node in traced.graph.nodes if node.target == "pow")
    given = next(n for n in traced.graph.find_nodes(op="placeholder") if traced.bindings[n.name].kind == "input")
    with traced.graph.inserting_before(node):
        traced.graph.call_method("add_", (given, 1))
    return Rewritten(traced, ("add_",))


def _raise(traced: TracedGraph) -> Rewritten:
    raise ValueError("no such node")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_halve_result, "result 0 is `float16[tokens, 8] cpu`, it was `float32[tokens, 8] cpu`"),
        (_use_before_definition, "the graph is not well formed"),
        (_wrong_size, "the graph does not run any more"),
        (_write_an_input, "is written in place"),
        (_raise, "it raised `ValueError: no such node`"),
        (lambda traced: traced, "it returned a `TracedGraph`"),
        (_assume_a_size, "it holds for some sizes only: `"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(function: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(PassError) as caught:
        compile_with(pw.graph_pass("culprit")(function))
    assert caught.value.message.startswith("pass `culprit` broke the graph: ")
    assert reason in caught.value.message
    assert caught.value.facts["pass"] == "culprit"
    assert "leave `culprit` out of `passes`" in caught.value.hint


def test_the_error_shows_the_difference() -> None:
    with pytest.raises(PassError, match="half") as caught:
        compile_with(pw.graph_pass("culprit")(_halve_result))
    assert any(line.startswith("+half = ") for line in caught.value.facts["diff"])


# ------------------------------------------------------------------------------------------------------- on a piece


def _pow_to_product(piece: FunctionalPiece) -> Rewritten:
    aten, found = torch.ops.aten, []
    for node in piece.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        with piece.graph.inserting_before(node):
            product = piece.graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
        node.replace_all_uses_with(product)
        piece.graph.erase_node(node)
        found.append(node.name)
    return Rewritten(piece, tuple(found))


def _halve_piece(piece: FunctionalPiece) -> Rewritten:
    output = piece.graph.output_node()
    with piece.graph.inserting_before(output):
        half = piece.graph.call_function(torch.ops.aten.to.dtype, (output.args[0][0], torch.float16))  # type: ignore[index]
    output.args = ([half],)
    return Rewritten(piece, ("half",))


def test_a_pass_on_a_piece_runs_inside_the_compiler() -> None:
    on_piece = pw.graph_pass("products", runs_on="piece")(_pow_to_product)
    program, recorder, store = compile_with(on_piece, compiler="aot_eager")
    assert {(done.name, done.matches, bool(done.piece)) for done in recorder.of(PassDone)} == {("products", 1, True)}
    artifacts = [store.read_record(ARTIFACT, key) for key in store.list_records(ARTIFACT)]
    assert artifacts
    assert all(one["facts"]["passes"][0]["matches"] == 1 for one in artifacts)
    assert all("passes=" in one["factors"]["compiler"]["version"] for one in artifacts)
    assert all("pow" not in store.read_blob(one["text"]).decode() for one in artifacts)


def test_a_pass_may_not_change_what_crosses_a_cut() -> None:
    halve = pw.graph_pass("halve", runs_on="piece")(_halve_piece)
    with pytest.raises(PassError) as caught:
        compile_with(halve, compiler="aot_eager")
    message = caught.value.message
    assert "pass `halve` broke the graph: result 0 is `float16[" in message
    assert "that is `v0`, which crosses the cut from piece 0 (region 0) to `passes_test::mix` (region 1)" in message
    assert (caught.value.facts["value"], caught.value.facts["pass"]) == ("v0", "halve")


def test_a_compiler_without_functional_pieces_says_that_a_pass_did_not_run() -> None:
    on_piece = pw.graph_pass("products", runs_on="piece")(_pow_to_product)
    _, recorder, _ = compile_with(on_piece, compiler="eager")
    (done,) = recorder.of(PassDone)
    assert (done.matches, done.note) == (0, "compiler `eager` has no functional piece")


# ---------------------------------------------------------------------------------------------------------- options


def test_names_are_checked() -> None:
    with pytest.raises(OptionError, match="pass `no_opps` is unknown") as caught:
        resolve_passes(("no_opps",))
    assert "did you mean `no_ops`?" in caught.value.hint
    with pytest.raises(OptionError, match="pass `no_ops` is given twice"):
        resolve_passes(("no_ops", "no_ops"))
    with pytest.raises(OptionError, match="`passes` holds `3`, which is no pass"):
        pw.CompileOptions(passes=(3,))
    with pytest.raises(OptionError, match="a pass cannot be named `two words`"):
        pw.graph_pass("two words")
    with pytest.raises(OptionError, match="a pass cannot run on `pieces`"):
        pw.graph_pass("one", runs_on="pieces")


def test_every_default_pass_is_there_and_has_its_name() -> None:
    found = resolve_passes(pw.DEFAULT_PASSES)
    assert tuple(one.name for one in found) == pw.DEFAULT_PASSES
    assert pw.CompileOptions().resolve().passes == pw.DEFAULT_PASSES
    assert pw.CompileOptions(optimization_level=1).resolve().passes == ()
