"""Verification before service: an artifact that does not give what its text gives is caught, named and not served."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import SPLIT, rows
from piecework.api.programs import make_request
from piecework.compilers.eager import EagerCompiler
from piecework.events import ArtifactCompiled, FallBack, Recorder, RecordHit, RecordMiss, VerificationFailed, Verified
from piecework.pipeline import compile_model
from piecework.runtime.program import Program
from piecework.seam.fx import parse_piece
from piecework.seam.loader import load
from piecework.stages.verify import Verification
from piecework.stages.verify.beside import Widened, expect
from piecework.stages.verify.draw import Source
from piecework.store.protocol import ARTIFACT
from piecework.values.artifact import INDUCTOR, TEXT, Artifact
from piecework.values.difference import compare
from piecework.values.shapes import Range
from piecework.values.verdict import FAILED, HELD, UNTRIED
from planted_compilers import Fault, PlantedCompiler, off_by_one_percent, with_other_strides, with_result
from toy_pieces import FIRST, MIDDLE, write_piece

WIDE = {"s0": Range(2, 8192)}
verify = Verification(Path)


def verdict_of(text: str, altered: str, box: Any = WIDE) -> Any:
    return verify(0, text, box, Artifact(TEXT, altered + "\n"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.cases.fresh(torch.tanh(self.up(x))) @ self.up.weight + self.down(torch.relu(self.up(x)))


def compile_with(
    fault: Fault, model: nn.Module, store: Any, **options: Any
) -> tuple[Program, Recorder, PlantedCompiler]:
    recorder, compiler = Recorder(), PlantedCompiler(fault)
    settings = pw.CompileOptions(compiler="eager", split_ops=SPLIT, **options).resolve()
    request = make_request(model, rows(5), {"x": {0: "tokens"}}, settings)
    request = dataclasses.replace(request, compiler=compiler)
    program = compile_model(request, lambda: dict(model.state_dict()), {}, store, recorder, model=model)
    return program, recorder, compiler


FAULTS = {"one percent": off_by_one_percent, "strides": with_other_strides}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_artifact_is_caught_named_and_not_served(fault: Fault) -> None:
    torch.manual_seed(0)
    model, store = Model(), pw.MemoryStore()
    program, recorder, _ = compile_with(fault, model, store)
    failed = recorder.of(VerificationFailed)
    compiled = recorder.of(ArtifactCompiled)
    # One row has no strides that could differ.
    caught = [(c.piece, c.range) for c in compiled if fault is off_by_one_percent or c.range != "s0=1"]
    assert [(f.piece, f.range) for f in failed] == caught
    assert all("strides" in f.reason if fault is with_other_strides else "off by 1.00e-02" in f.reason for f in failed)
    assert len(recorder.of(FallBack)) == len(failed) >= 4
    x = rows(9)[0]
    with torch.no_grad():
        assert torch.equal(program(x), model(x))
    kept = [store.read_record(ARTIFACT, event.key) for event in compiled]
    assert {record["facts"]["verified"] for record in kept if record["facts"].get("fall_back")} == {"failed"}
    assert all(record["facts"]["errors"] for record in kept)


def test_without_verification_the_fault_is_served() -> None:
    model = Model()
    program, recorder, _ = compile_with(off_by_one_percent, model, pw.MemoryStore(), verify=False)
    x = rows(9)[0]
    assert not torch.allclose(program(x), model(x), rtol=1e-4)
    assert recorder.of(Verified) == []


def test_a_right_artifact_is_served_and_the_record_says_on_what_it_was_tried() -> None:
    model, store = Model(), pw.MemoryStore()
    _, recorder, _ = compile_with(lambda text: text, model, store)
    assert {event.outcome for event in recorder.of(Verified)} == {HELD}
    facts = [store.read_record(ARTIFACT, event.key)["facts"] for event in recorder.of(ArtifactCompiled)]
    assert {each["verified"] for each in facts} == {"real"}
    assert {size for each in facts for size in each["errors"]} == {
        "s0=1", "s0=2", "s0=11", "s0=64", "s0=65", "s0=183", "s0=512",
    }  # fmt: skip


def test_a_warm_start_neither_verifies_nor_writes() -> None:
    model, store = Model(), pw.MemoryStore()
    compile_with(lambda text: text, model, store)
    before = {kind: store.list_records(kind) for kind in ("program", "artifact")}
    _, recorder, compiler = compile_with(lambda text: text, model, store)
    assert recorder.of(Verified) == [] and compiler.boxes == []
    assert before == {kind: store.list_records(kind) for kind in before}


def test_the_text_itself_needs_no_proof() -> None:
    assert verify(0, MIDDLE, WIDE, EagerCompiler().compile(MIDDLE, WIDE)).outcome == UNTRIED


@pytest.mark.parametrize("position", range(3))
def test_each_result_is_looked_at(position: int) -> None:
    found = verdict_of(MIDDLE, off_by_one_percent(MIDDLE, position))
    assert found.outcome == FAILED
    assert ("`r10`", "`k10`", "`q5`")[position] in found.reason


def test_memory_that_nobody_wrote_is_no_result() -> None:
    """The fourth result of the toy's pieces is a buffer that the opaque operator fills."""
    assert verdict_of(MIDDLE, with_result(MIDDLE, 3, "{}.fill_(7.0)")).outcome == HELD
    assert "`q6` has shape" in verdict_of(MIDDLE, with_result(MIDDLE, 3, "{}.flatten()")).reason


def test_indices_are_drawn_within_what_they_index() -> None:
    found = verdict_of(FIRST, FIRST)
    assert (found.outcome, found.facts["rows"]) == (HELD, "independent")
    shifted = write_piece(
        {"s0": "int", "x0": "int64[s0] cpu", "w0": "weight float32[5, 3] cpu"},
        "v0 = operator.add(x0, 3)", "v1 = torch.nn.functional.embedding(v0, w0)", "return (v1,)",
    )  # fmt: skip
    found = verdict_of(shifted, shifted)
    assert found.outcome == HELD and found.facts["errors"]["s0=512"] == [0.0]


def test_rows_that_depend_on_one_another_are_tried_at_the_true_end() -> None:
    spec = {"s0": "int", "x0": "float32[s0, 4] cpu"}
    over_rows = write_piece(spec, "v0 = torch.softmax(x0, 0)", "return (v0,)")
    over_columns = write_piece(spec, "v0 = torch.softmax(x0, 1)", "return (v0,)")
    assert list(verdict_of(over_rows, over_rows).facts["errors"]) == ["s0=2", "s0=129", "s0=8192"]
    assert list(verdict_of(over_columns, over_columns).facts["errors"]) == ["s0=2", "s0=33", "s0=512"]
    running = write_piece(spec, "v0 = torch.cumsum(x0, 0)", "return (v0,)")
    assert verdict_of(running, running).facts["rows"] == "dependent"


def test_where_eager_gives_no_number_the_artifact_may_give_none_either() -> None:
    spec = {"s0": "int", "x0": "float32[s0, 4] cpu"}
    roots = write_piece(spec, "v0 = torch.sqrt(x0)", "return (v0,)")
    assert verdict_of(roots, roots).outcome == HELD
    filled = write_piece(spec, "v0 = torch.sqrt(x0)", "v1 = torch.nan_to_num(v0, 0.0)", "return (v1,)")
    assert "is a number where eager has none" in verdict_of(roots, filled).reason
    spoiled = with_result(filled, 0, "operator.truediv(x0, x0)", "operator.mul({}, float('nan'))".replace("'", '"'))
    assert verdict_of(filled, spoiled).outcome == FAILED


def test_only_numbers_above_zero_where_others_give_none() -> None:
    spec = {"s0": "int", "x0": "float32[s0, 4] cpu"}
    sums = write_piece(spec, "v0 = torch.log(x0)", "v1 = v0.sum()", "return (v1,)")
    found = verdict_of(sums, sums)
    assert found.outcome == HELD and None not in found.facts["errors"]["s0=129"]
    assert verdict_of(sums, off_by_one_percent(sums)).outcome == FAILED


def test_rounding_of_small_differences_of_large_numbers_is_no_fault() -> None:
    """Another order of the sum is as good; which one is off by less is luck where the sum is all but nothing."""
    spec = {"s0": "int", "x0": "float32[s0, 17] cpu"}
    text = write_piece(spec, "v0 = x0.sum(-1)", "v1 = torch.reciprocal(v0)", "return (v1,)")
    other = write_piece(spec, "v9 = x0.roll(3, -1)", "v0 = v9.sum(-1)", "v1 = torch.reciprocal(v0)", "return (v1,)")
    piece = parse_piece(text)
    (found,) = expect(piece, Source(piece).draw({"s0": 32})).against(load(Artifact(TEXT, other), kernel_path=Path))
    assert found.is_fault and found.is_narrow
    box = {"s0": Range(2, 32)}
    assert verdict_of(text, other, box).outcome == HELD
    assert verdict_of(text, with_result(other, 0, "torch.mul({}, 1.0001)"), box).outcome == FAILED


def test_what_a_piece_writes_in_place_is_a_result() -> None:
    spec = {"s0": "int", "x0": "float32[s0, 4] cpu", "x1": "float32[s0, 4] cpu"}
    right = write_piece(spec, "v0 = x0.mul_(x1)", "v1 = operator.add(v0, 1.0)", "return (v1,)")
    assert verdict_of(right, right).outcome == HELD
    unwritten = write_piece(spec, "v0 = torch.mul(x0, x1)", "v1 = operator.add(v0, 1.0)", "return (v1,)")
    assert "`x0 after the call`" in verdict_of(right, unwritten).reason
    also = write_piece(spec, "v0 = x0.mul_(x1)", "v1 = operator.add(v0, 1.0)", "v2 = x1.zero_()", "return (v1,)")
    assert "`x1 after the call`" in verdict_of(right, also).reason


def test_random_numbers_are_no_result() -> None:
    spec = {"s0": "int", "x0": "float32[s0, 4] cpu"}
    noisy = write_piece(spec, "v0 = torch.rand_like(x0)", "v1 = operator.mul(x0, 2.0)", "return (v0, v1)")
    found = verdict_of(noisy, noisy)
    assert found.outcome == HELD and found.facts["errors"]["s0=2"] == [None, 0.0]
    state = torch.get_rng_state()
    verdict_of(noisy, noisy)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_precisions_have_their_own_tolerance(dtype: str) -> None:
    spec = {"s0": "int", "x0": f"{dtype}[s0, 64] cpu", "w0": f"weight {dtype}[64, 64] cpu"}
    text = write_piece(spec, "v0 = torch.nn.functional.linear(x0, w0)", "v1 = v0.float()", "v2 = torch.exp(v1)",
                       f"v3 = v2.to(torch.{dtype})", "return (v3,)")  # fmt: skip
    wide = write_piece(spec, "v0 = x0.double()", "v1 = w0.double()", "v2 = torch.nn.functional.linear(v0, v1)",
                       "v3 = torch.exp(v2)", f"v4 = v3.to(torch.{dtype})", "return (v4,)")  # fmt: skip
    assert verdict_of(text, text).outcome == HELD
    assert dtype == "float64" or verdict_of(text, wide).outcome == HELD
    assert verdict_of(text, with_result(text, 0, "torch.mul({}, 1.5)")).outcome == FAILED


def test_strides_of_inputs_are_those_of_the_specs() -> None:
    spec = {"s0": "int", "x0": "float32[s0, 4] strides[1, s0] cpu", "x1": "float32[s0, 4] strides[0, 1] cpu"}
    text = write_piece(spec, "v0 = operator.add(x0, x1)", "v1 = x0.stride(0)", "return (v0, v1)")
    assert verdict_of(text, text).outcome == HELD
    assert "`v1` is `2`, in eager `1`" in verdict_of(text, with_result(text, 1, "operator.add({}, 1)")).reason


def test_what_raises_or_cannot_be_read_is_not_served() -> None:
    spec = {"s0": "int", "x0": "float32[s0, 4] cpu"}
    text = write_piece(spec, "v0 = operator.add(x0, 1.0)", "return (v0,)")
    assert "it raises `RuntimeError" in verdict_of(text, with_result(text, 0, "{}.view(3, 3, 3)")).reason
    assert "it does not load" in verdict_of(text, text.replace("operator.add", "operator.no_such")).reason
    assert "it returns 2 results, eager 1" in verdict_of(text, text.replace("(v0,)", "(v0, v0)")).reason


def test_what_cannot_be_tried_is_said_to_be_untried() -> None:
    spec = {"s0": "int", "u0": "int unbacked", "x0": "float32[s0, 4] cpu"}
    text = write_piece(spec, "v0 = x0.view(u0, 7, 9)", "return (v0,)")
    found = verdict_of(text, text)
    assert found.outcome == UNTRIED and "eager does not run on inputs drawn for `s0=2`" in found.reason
    elsewhere = Artifact(INDUCTOR, text, facts={"machine": {"machine": "no such machine"}})
    found = verify(0, MIDDLE, WIDE, elsewhere)
    assert found.outcome == UNTRIED and "it does not load here: the artifact was built for" in found.reason


def verified(store: Any) -> set[str]:
    return {str(store.read_record(ARTIFACT, key)["facts"].get("verified")) for key in store.list_records(ARTIFACT)}


def test_what_was_stored_unverified_is_verified_by_the_next_build_that_would() -> None:
    store, model = pw.MemoryStore(), Model()
    compile_with(lambda text: text, model, store, verify=False)
    assert verified(store) == {"None"}
    program, recorder, compiler = compile_with(lambda text: text, model, store)
    assert (compiler.boxes, recorder.of(ArtifactCompiled)) == ([], [])
    assert {event.outcome for event in recorder.of(Verified)} == {HELD} and verified(store) == {"real"}
    assert "compiled with `verify=False`, and now they are to be verified" in recorder.of(RecordMiss)[0].reason
    for verify in (True, False):  # tried once, it is believed
        _, recorder, _ = compile_with(lambda text: text, model, store, verify=verify)
        assert recorder.of(RecordHit) and not recorder.of(Verified)
    x = rows(7)[0]
    with torch.no_grad():
        assert torch.equal(program(x), model(x))


def test_what_was_stored_unverified_and_is_wrong_is_replaced() -> None:
    store, model = pw.MemoryStore(), Model()
    x = rows(7)[0]
    wrong, _, _ = compile_with(off_by_one_percent, model, store, verify=False)
    right, recorder, compiler = compile_with(off_by_one_percent, model, store)
    assert compiler.boxes == [] and recorder.of(VerificationFailed) and verified(store) == {"failed"}
    with torch.no_grad():
        assert torch.equal(right(x), model(x)) and not torch.equal(wrong(x), model(x))
    _, again, _ = compile_with(off_by_one_percent, model, store)
    assert again.of(RecordHit) and again.of(FallBack)  # told at each start


def test_a_reference_that_a_gpu_has_no_room_for_is_computed_on_the_cpu() -> None:
    """The same numbers, wherever they are computed: here it is one place, under a bound that nothing keeps."""
    piece = parse_piece(MIDDLE)
    values = Source(piece).draw({"s0": 5})
    usual, aside = expect(piece, values, Widened()), expect(piece, values, Widened(device_bytes=0.0))
    assert usual.reference is not None and aside.reference is not None
    assert all(map(torch.equal, usual.reference, aside.reference))
    assert {each.dtype for each in aside.reference} == {torch.float64}
    assert not any(found.fault for found in map(compare, aside.names, aside.eager, aside.eager, aside.reference))
