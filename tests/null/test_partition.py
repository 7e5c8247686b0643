"""One graph cut before it is compiled, in what was compiled of it, or not at all: the same results, the same cuts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import capture_toys as toys
import piecework as pw
from capture_toys import toy
from partitions import PARTITIONS, compiled, inputs, kept, layers
from piecework.capture_events import Captured
from piecework.diagnostics.explain import explain_record
from piecework.diagnostics.explain_text import explain_lines
from piecework.engine.generate import allocate_caches, run_step
from piecework.errors import BindError, CaptureError, ContractError, OptionError
from piecework.events import CutInside, FallBack, Recorder, SplitDone
from piecework.seam.operators import resolve_bodies
from piecework.stages.find import read_program
from tiny_models import ARCHITECTURES, tiny_folder

CUTS = {"regions": 7, "opaque": 3, "inline": 0, "sites": 4}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_partition_gives_what_the_model_gives(partition: str) -> None:
    model = layers()
    program = compiled(model, partition)
    for count in (2, 3, 33, 64, 5, 5, 5, 5, 5):  # a small size that comes back is bound to that size
        given, right = inputs(count), inputs(count)
        torch.testing.assert_close(program(*given), model(*right))
        torch.testing.assert_close(given[2], right[2])


def test_cuts_are_told_alike() -> None:
    model, found, texts = layers(), {}, {}
    for partition in PARTITIONS:
        store, watch = pw.MemoryStore(), Recorder()
        program = compiled(model, partition, store=store, observer=watch)
        explained = explain_record(program.key, read_program(program.key, store), store, store)
        found[partition] = explained | {"events": [(e.regions, e.opaque) for e in watch.of(SplitDone)]}
        found[partition]["inside"] = [(e.range, e.regions, e.opaque) for e in watch.of(CutInside)]
        texts[partition] = "\n".join(explain_lines(explained))
    fx, inductor, whole = (found[each] for each in PARTITIONS)
    assert {name: fx[name] for name in CUTS} == {name: inductor[name] for name in CUTS} == CUTS
    assert [each["kind"] for each in fx["cuts"]] == [each["kind"] for each in inductor["cuts"]]
    called = [[name.partition(".")[0] for name in each.get("calls", ())] for each in fx["cuts"]]
    assert [each.get("calls", []) for each in inductor["cuts"]] == called
    assert (whole["regions"], whole["opaque"], whole["sites"]) == (1, 0, 1)
    assert fx["split_ops"] == inductor["split_ops"] == whole["split_ops"]
    assert (fx["events"], inductor["events"]) == ([(7, 3)], [(1, 0)])
    assert inductor["inside"] == [("s0=2-64", 7, 3)] and fx["inside"] == whole["inside"] == []
    assert "in what was compiled of the whole graph" in texts["inductor"]
    assert "nothing: one piece, with partitions::attend (declared in partitions)" in texts["none"]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_bodies_that_are_handed_in_are_called_wherever_the_graph_is_cut(partition: str) -> None:
    model, called = layers(), []

    def mine(query: Tensor, token: Tensor, slots: Tensor, cache: Tensor, out: Tensor, layer: str) -> None:
        called.append(layer)
        out.copy_(query)

    program = compiled(model, partition, ops={"partitions::attend": mine})
    before = len(kept)
    program(*inputs(4))
    assert called == ["layers.0", "layers.1"] and len(kept) == before


@pytest.mark.parametrize("is_fresh", [False, True], ids=["written", "returned"])
def test_a_capture_goes_around_the_same_calls(is_fresh: bool) -> None:
    model, watch = toy(is_fresh=is_fresh), Recorder()
    program = toys.captured(
        model, program=toys.compiled(model, partition="inductor"), decode="piecewise", decode_sizes=(2, 4, 8),
        observer=watch,
    )  # fmt: skip
    assert [(e.size, e.graphs, e.segments) for e in watch.of(Captured)] == [(8, 4, 7), (4, 4, 7), (2, 4, 7)]
    for step, count in enumerate((2, 3, 4, 8, 7, 1, 20, 2)):
        given = toys.inputs(count, step)
        torch.testing.assert_close(program(*given), model(*given), rtol=1e-6, atol=1e-6)


def test_what_is_not_cut_is_captured_full_or_not_at_all() -> None:
    model = toy()
    program = toys.compiled(model, partition="none")
    with pytest.raises(CaptureError, match="the program holds no opaque operator to cut at"):
        toys.captured(model, program=program, decode="piecewise")
    whole = toys.captured(model, program=program, decode="full")
    torch.testing.assert_close(whole(*toys.inputs(3)), model(*toys.inputs(3)), rtol=1e-6, atol=1e-6)
    with pytest.raises(CaptureError, match=r"`capture_toys::mix` \(uniform_decode\) may not stand inside its graph"):
        toys.captured(model, program=program, decode="none", prefill="full", prefill_sizes=(4,))


def test_two_ranges_have_cuts_of_their_own() -> None:
    store, watch, model = pw.MemoryStore(), Recorder(), layers()
    program = compiled(model, "inductor", store=store, observer=watch, options={"ranges": ((2, 8), (9, 64))})
    assert [e.range for e in watch.of(CutInside)] == ["s0=2-8", "s0=9-64"]
    explained = explain_record(program.key, read_program(program.key, store), store, store)
    assert explained["cuts_by_range"]["s0=2-8"]["regions"] == explained["cuts_by_range"]["s0=9-64"]["regions"] == 7
    for count in (8, 9):
        torch.testing.assert_close(program(*inputs(count)), model(*inputs(count)))


def test_a_function_has_no_text_to_cut_and_says_so() -> None:
    watch, model = Recorder(), layers()
    program = compiled(model, "inductor", observer=watch, options={"compiler": lambda module, inputs: module.forward})
    (fallen,) = watch.of(FallBack)
    assert "has no text to cut: it is captured `full` or not at all" in fallen.reason
    torch.testing.assert_close(program(*inputs(4)), model(*inputs(4)))


def test_a_call_that_a_compiler_would_remove_is_refused() -> None:
    class Unused(torch.nn.Module):
        def forward(self, x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
            torch.ops.partitions.two(x)
            return x.sin()

    assert compiled(Unused(), "fx")(*inputs(3)).shape == (3, 8)
    for partition in ("inductor", "none"):
        with pytest.raises(ContractError, match="a compiler which sees the whole graph removes the call") as caught:
            compiled(Unused(), partition)
        assert 'partition="fx"' in str(caught.value.hint)


def test_what_contradicts_a_partition_is_an_error() -> None:
    with pytest.raises(OptionError, match="partition `inducter` is unknown") as caught:
        pw.CompileOptions(partition="inducter")
    assert "did you mean `inductor`" in str(caught.value.hint)
    with pytest.raises(OptionError, match="`partition` is `inductor` and `merge_consecutive` is `False`"):
        pw.CompileOptions(partition="inductor", merge_consecutive=False)
    with pytest.raises(OptionError, match="`partition` is `none` and `mode` is `trace_once`, which contradict"):
        pw.CompileOptions(partition="none", mode="trace_once")


def test_an_operator_that_nobody_registered_is_named() -> None:
    """A body is found for operators inside as for those that are cut at."""
    store = pw.MemoryStore()
    program = compiled(layers(), "inductor", store=store)
    record = read_program(program.key, store)
    assert record.partition == "inductor" and record.split_ops == (
        "partitions::attend", "partitions::two", "partitions::write",
    )  # fmt: skip
    with pytest.raises(BindError, match="operator `partitions::gone` has no body here"):
        resolve_bodies(replace(record, split_ops=("partitions::gone",)), {})


def logits_of(folder: Path, partition: str, compiler: str, passes: tuple[str, ...] = ()) -> tuple[Tensor, Any]:
    """Run a prompt and two single tokens after it; return all logits, and how the program is cut."""
    options = pw.CompileOptions(
        compiler=compiler, partition=partition, max_num_batched_tokens=16, ranges=((1, 16),), passes=passes
    )
    store = pw.MemoryStore()
    model = pw.LLM(folder, options=options, store=store).model
    assert model.record is not None
    caches = allocate_caches(model.sites, num_pages=2, page_size=16, dtype=model.dtype)
    prompt = list(range(5, 17))
    found = [run_step(model.step, prompt, 0, caches)]
    found += [run_step(model.step, [token], 12 + index, caches) for index, token in enumerate((40, 41))]
    explained = explain_record("", model.record, store, store)
    return torch.stack(found), {name: explained[name] for name in ("regions", "opaque", "sites")}


@pytest.mark.parametrize(
    "architecture",
    [name if name == "gpt_oss" else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)
def test_each_architecture_is_cut_alike_and_gives_the_same(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(architecture, tmp_path)
    (fx, cuts), (inductor, inside) = (logits_of(folder, each, "eager") for each in ("fx", "inductor"))
    assert cuts == inside == {"regions": 7, "opaque": 3, "sites": 4}
    torch.testing.assert_close(inductor, fx, rtol=0, atol=0)
