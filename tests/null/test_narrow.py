"""What a compiler assumes beyond a box cuts the box there, and both sides are compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import SPLIT, rows
from piecework.api.programs import make_request
from piecework.diagnostics.explain import explain_record
from piecework.diagnostics.explain_text import explain_lines
from piecework.events import ArtifactCompiled, ArtifactReused, FallBack, RangeSplit, Recorder
from piecework.pipeline import compile_model
from piecework.runtime.program import Program
from piecework.stages.find import read_program
from piecework.store.protocol import ARTIFACT
from piecework.values.narrow import kept_box, rest_of
from piecework.values.shapes import Box, Range
from planted_compilers import PlantedCompiler, with_result


class TwoPieces(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.ops.cases.fresh(torch.relu(x) + 1)) * 2


def compile_with(compiler: Any, store: Any, **options: Any) -> tuple[Program, Recorder]:
    recorder = Recorder()
    settings = pw.CompileOptions(compiler="eager", split_ops=SPLIT, **options).resolve()
    request = make_request(TwoPieces(), rows(5), {"x": {0: "tokens"}}, settings)
    request = dataclasses.replace(request, compiler=compiler)
    return compile_model(request, dict, {}, store, recorder, model=TwoPieces()), recorder


def at_most(limit: int) -> Any:
    """Assume of pieces that call relu that there are at most so many rows, where the box says nothing of it."""

    def guards(text: str, box: Box) -> tuple[str, ...]:
        size = box["s0"]
        return (f"s0 <= {limit}",) if "relu" in text and size.low <= limit < size.high else ()

    return guards


def test_a_box_is_cut_where_the_compiler_assumed_more() -> None:
    store, compiler = pw.MemoryStore(), PlantedCompiler(lambda text: text, at_most(4096))
    program, recorder = compile_with(compiler, store)
    (split,) = recorder.of(RangeSplit)
    assert (split.range, split.parts) == ("s0=65-8192", ("s0=65-4096", "s0=4097-8192"))
    assert recorder.of(FallBack) == []
    assert len(compiler.boxes) == len(recorder.of(ArtifactCompiled)) == 2 * 3 + 1
    record = read_program(program.key, store)
    assert list(record.ranges["tokens"]) == ["1", "2-64", "65-4096", "4097-8192"]
    boxes = ["s0=1", "s0=2-64", "s0=65-4096", "s0=4097-8192"]
    assert all(set(piece.artifacts) == set(boxes) for piece in record.pieces)
    # The piece that was not cut has one artifact for both.
    assert sorted(len(set(piece.artifacts.values())) for piece in record.pieces) == [3, 4]
    for size in (1, 2, 65, 4096, 4097, 8192):
        x = rows(size)[0]
        assert torch.equal(program(x), TwoPieces()(x))
    lines = "\n".join(explain_lines(explain_record(program.key, record, store, store)))
    assert "assumes s0 <= 4096" in lines


def test_each_size_runs_the_artifact_of_its_part() -> None:
    """The wide artifact is right where its guard holds alone: this one tells by its result which one ran."""

    class ByHand(PlantedCompiler):
        def compile(self, text: str, box: Box) -> Any:
            artifact = super().compile(text, box)
            if "relu" not in text:
                return artifact
            return dataclasses.replace(artifact, text=with_result(text, 0, f"operator.add({{}}, {box['s0'].low})"))

    compiler = ByHand(lambda text: text, at_most(4096))
    program, _ = compile_with(compiler, pw.MemoryStore(), verify=False)
    for size, added in ((1, 1), (64, 2), (4096, 65), (4097, 4097)):
        x = torch.rand(size, 4)
        assert torch.allclose(program(x), torch.tanh((torch.relu(x) + 1 + added) * 3) * 2)


def test_what_is_stored_is_cut_in_the_same_way_without_compiling() -> None:
    store = pw.MemoryStore()
    first, _ = compile_with(PlantedCompiler(lambda text: text, at_most(100)), store)
    ranges = read_program(first.key, store).ranges
    store.delete_record("program", first.key)
    compiler = PlantedCompiler(lambda text: text, at_most(100))
    second, recorder = compile_with(compiler, store)
    assert compiler.boxes == [] and len(recorder.of(ArtifactReused)) == 7
    assert read_program(second.key, store).ranges == ranges


def test_a_box_is_cut_a_few_times_and_the_rest_runs_eager() -> None:
    def guards(text: str, box: Box) -> tuple[str, ...]:
        return () if box["s0"].is_single else (f"s0 <= {box['s0'].low}",)

    store = pw.MemoryStore()
    program, recorder = compile_with(PlantedCompiler(lambda text: text, guards), store)
    assert all(len(split.parts) == 8 for split in recorder.of(RangeSplit)) and len(recorder.of(RangeSplit)) == 4
    assert len(recorder.of(FallBack)) == 4 and "at which its sizes cannot be cut" in recorder.of(FallBack)[0].reason
    for size in (1, 2, 3, 64, 65, 80, 8192):
        x = rows(size)[0]
        assert torch.equal(program(x), TwoPieces()(x))


@pytest.mark.parametrize("guard", ["s0 % 8 == 0", "s0 > 9000", "s0 <= u0", "s0 <= strange(3)", "s0 / 0 > 1"])
def test_a_guard_at_which_nothing_can_be_cut_makes_the_piece_run_eager(guard: str) -> None:
    compiler = PlantedCompiler(lambda text: text, lambda text, box: (guard,) if not box["s0"].is_single else ())
    store = pw.MemoryStore()
    program, recorder = compile_with(compiler, store)
    assert len(recorder.of(FallBack)) == 4 and all(f"`{guard}`" in each.reason for each in recorder.of(FallBack))
    assert recorder.of(RangeSplit) == []
    records = [store.read_record(ARTIFACT, event.key) for event in recorder.of(ArtifactCompiled)]
    assert all(record["guards"] == [] for record in records)
    x = rows(9)[0]
    assert torch.equal(program(x), TwoPieces()(x))


BOX = {"s0": Range(2, 64), "s1": Range(2, 8192)}


@pytest.mark.parametrize(
    ("guards", "kept"),
    [
        (["s0 <= 16"], {"s0": Range(2, 16), "s1": Range(2, 8192)}),
        (["s0 >= 5", "s1 < 100"], {"s0": Range(5, 64), "s1": Range(2, 99)}),
        (["s0 != 10"], {"s0": Range(11, 64), "s1": Range(2, 8192)}),
        (["s0 <= s1 + 62"], BOX),
        (["s0 <= s1"], None),
        (["s0 <= 8", "s0 < s1 + 7"], {"s0": Range(2, 8), "s1": Range(2, 8192)}),
        (["8 == 8"], BOX),
        (["s0 < 2"], None),
    ],
)
def test_the_widest_part_where_all_guards_hold(guards: list[str], kept: Any) -> None:
    assert kept_box(guards, BOX) == kept


def test_parts_and_what_is_left_cover_the_box_once() -> None:
    kept = {"s0": Range(5, 16), "s1": Range(2, 99)}
    boxes = [kept, *rest_of(BOX, kept)]
    for s0 in range(2, 65):
        for s1 in (2, 50, 99, 100, 8192):
            assert sum(s0 in box["s0"] and s1 in box["s1"] for box in boxes) == 1
