"""Inductor sees the whole graph and is cut in its text: results, cuts, memory, capture, warm starts as for pieces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import capture_toys as toys
import piecework as pw
from partitions import PARTITIONS, ROWS, WIDTH, compiled, inputs, kept, layers
from piecework.capture_events import Captured
from piecework.engine.generate import allocate_caches, run_step
from piecework.events import ArtifactCompiled, CutInside, FallBack, Recorder, Verified
from piecework.seam.dry import DryDevice
from piecework.store.protocol import ARTIFACT
from piecework.values.difference import compare
from tiny_models import ARCHITECTURES, tiny_folder, tiny_model
from toy_box import run_starts, write_package

COMPILER = {"compiler": "inductor"}
_built: dict[str, tuple[Any, pw.MemoryStore, Recorder]] = {}


def built(partition: str) -> tuple[Any, pw.MemoryStore, Recorder]:
    """Compile the model once for all tests; what is not cut at all shares the artifact of what is cut in its text."""
    if partition not in _built:
        store = _built["inductor"][1] if partition == "none" and "inductor" in _built else pw.MemoryStore()
        watch = Recorder()
        _built[partition] = compiled(layers(), partition, options=COMPILER, store=store, observer=watch), store, watch
    return _built[partition]


def texts(store: pw.MemoryStore) -> list[str]:
    return [store.read_blob(store.read_record(ARTIFACT, key)["text"]).decode() for key in store.list_records(ARTIFACT)]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_partition_gives_what_the_model_gives(partition: str) -> None:
    program, store, watch = built(partition)
    assert watch.of(FallBack) == []
    if partition != "none":  # which finds the artifact tried already
        assert {(e.outcome, e.reason) for e in watch.of(Verified)} == {("held", "")}
    model = layers()
    for count in (2, 33, 64, 5, 5, 5, 5, 5):  # a small size that comes back is bound to that size
        given, right = inputs(count), inputs(count)
        torch.testing.assert_close(program(*given), model(*right), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(given[2], right[2])
    wide = re.compile(rf"\({ROWS}, {WIDTH}\)|\(({ROWS * WIDTH}),\)")
    lines = [line for text in texts(store) for line in text.splitlines() if wide.search(line)]
    assert not [line for line in lines if "empty" in line or "clone" in line], "the cache is copied whole"


def test_the_text_is_cut_where_the_graph_would_be() -> None:
    (cut,) = built("inductor")[2].of(CutInside)
    fx = [region.operators for region in built("fx")[0].bound.outline(0).regions]
    inductor = [region.operators for region in built("inductor")[0].bound.outline(0).regions]
    assert (cut.regions, cut.opaque) == (7, 3)
    assert [[name.partition(".")[0] for name in names] for names in fx] == [list(names) for names in inductor]


def test_one_artifact_serves_both_that_are_compiled_whole() -> None:
    built("inductor")
    assert built("none")[2].of(ArtifactCompiled) == []


def test_what_a_body_keeps_is_written_over_by_nothing() -> None:
    """It holds until the next step, and an operator that says it retains its arguments keeps them beyond."""
    program, *_ = built("inductor")
    kept.clear()
    for count in (3, 3, 3, 3, 3, 40):
        program(*inputs(count))
    assert len(kept) == 12
    for handed, then in kept:
        torch.testing.assert_close(handed, then, rtol=0, atol=0)


def test_what_was_compiled_whole_is_captured_around_its_opaque_calls() -> None:
    model, watch = toys.toy(), Recorder()
    program = toys.compiled(model, partition="inductor", compiler="inductor", ranges=((2, 64),), size_one=False)
    replayed = toys.captured(
        model, program=program, decode="piecewise", decode_sizes=(2, 4, 8), observer=watch,
        device=DryDevice(by_call=True),
    )  # fmt: skip
    assert [(e.size, e.graphs, e.segments) for e in watch.of(Captured)] == [(8, 4, 7), (4, 4, 7), (2, 4, 7)]
    for step, count in enumerate((2, 3, 4, 8, 7, 20, 2)):
        given = toys.inputs(count, step)
        torch.testing.assert_close(replayed(*given), model(*given))


@pytest.mark.slow
def test_a_warm_start_of_a_whole_graph_compiles_nothing(tmp_path: Path) -> None:
    folder, store = write_package(tmp_path / "package"), tmp_path / "store"
    options = {"compiler": "inductor", "size_one": False, "partition": "inductor"}
    cold = run_starts(folder, store, [{"config": {"layers": 2}}], options=options, TMPDIR=str(tmp_path))
    assert cold.starts[0].fall_backs == []
    warm = run_starts(
        folder, store, [{"config": {"layers": 2}}], options=options, read_only=True, forbid=True, PATH="",
        HOME=str(tmp_path), TMPDIR=str(tmp_path),
    )  # fmt: skip
    (start,) = warm.starts
    assert (start.key, start.is_hit, start.loaded) == (cold.starts[0].key, True, 1)
    assert (start.compiled, start.has_traced, start.fall_backs) == ([], False, [])
    assert start.difference < 1e-5
    assert [name for name in warm.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))] == []


EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(n, marks=pytest.mark.slow if n == "llama" else pytest.mark.soak) for n in ARCHITECTURES],
)
def test_each_architecture_agrees_however_it_is_cut(architecture: str, tmp_path: Path) -> None:
    folder, prompt = tiny_folder(architecture, tmp_path), list(range(5, 17))
    plain, exact = tiny_model(architecture), tiny_model(architecture).double()
    if architecture in EXPERTS:
        exact.set_experts_implementation("eager")  # torch's grouped product knows no float64
    with torch.no_grad():
        ids = torch.tensor([prompt])
        wanted, right = (model(input_ids=ids, use_cache=False).logits[0, -1] for model in (plain, exact))
    for partition in ("fx", "inductor"):
        watch, store = Recorder(), pw.MemoryStore()
        options = pw.CompileOptions(
            partition=partition, max_num_batched_tokens=16, ranges=((2, 16),), size_one=False, passes=()
        )
        model = pw.LLM(folder, options=options, store=store, observer=watch).model
        assert [fallen.reason for fallen in watch.of(FallBack)] == []
        assert [(e.regions, e.opaque) for e in watch.of(CutInside)] == ([(7, 3)] if partition == "inductor" else [])
        caches = allocate_caches(model.sites, num_pages=1, page_size=16, dtype=model.dtype)
        difference = compare(f"{architecture} {partition}", run_step(model.step, prompt, 0, caches), wanted, right)
        assert not difference.is_fault, difference.fault
        assert {e.outcome for e in watch.of(Verified)} == {"held"}
