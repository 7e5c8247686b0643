"""Full, piecewise and breakable capture give what eager gives, on a device as unforgiving as a real one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from capture_toys import captured, compiled, inputs, toy
from piecework.capture_events import Captured, Replayed, Uncovered
from piecework.errors import CaptureError
from piecework.events import Recorder
from piecework.values.phases import TABLE

LEGAL = sorted(pair for pair, why in TABLE.items() if not why and pair[0] != "stock")


def program_of(model: Any, mode: str) -> Any:
    return compiled(model, mode=mode) if mode in ("piecewise", "trace_once") else None


@pytest.mark.parametrize(("mode", "capture"), LEGAL)
@pytest.mark.parametrize("is_fresh", [False, True], ids=["written", "returned"])
def test_every_legal_pair_gives_what_eager_gives(mode: str, capture: str, is_fresh: bool) -> None:
    model = toy(is_fresh=is_fresh)
    sizes = {} if capture != "none" else {"decode_sizes": None}
    program = captured(model, mode=mode, program=program_of(model, mode), decode=capture, **sizes)
    counts = [1, 2, 3, 4, 5, 7, 8, 20] * 2
    random.Random(0).shuffle(counts)
    for step, count in enumerate(counts):
        given = inputs(count, step)
        torch.testing.assert_close(program(*given), model(*given), rtol=1e-6, atol=1e-6)
    covered = sum(1 for count in counts if count <= 8) if capture != "none" else 0
    outcome = {key: n for key, n in program.counts.items() if key[1] != "uncovered"}
    assert sum(outcome.values()) == covered
    assert {form for _, form in outcome} == ({capture} if covered else set())


def test_piecewise_has_a_graph_a_piece_and_a_call_between() -> None:
    watch = Recorder()
    captured(toy(3), decode="piecewise", decode_sizes=(4,), observer=watch)
    (event,) = watch.of(Captured)
    assert (event.form, event.size, event.graphs, event.segments) == ("piecewise", 4, 4, 7)


def test_full_is_one_segment_over_the_same_artifacts() -> None:
    watch = Recorder()
    captured(toy(3), decode="full", decode_sizes=(4,), observer=watch)
    (event,) = watch.of(Captured)
    assert (event.form, event.graphs, event.segments) == ("full", 1, 1)


def test_breakable_finds_the_same_cuts_in_a_model_that_was_never_traced() -> None:
    watch = Recorder()
    captured(toy(3), mode="none", decode="breakable", decode_sizes=(4,), observer=watch)
    (event,) = watch.of(Captured)
    assert (event.form, event.graphs, event.segments) == ("breakable", 4, 7)


def test_forms_stand_side_by_side_and_each_call_says_which_served_it() -> None:
    watch, phase = Recorder(), ["decode"]
    model = toy()
    program = captured(
        model, decode="full", prefill="piecewise", prefill_sizes=(4, 8), decode_sizes=(2, 4), phase_of=lambda: phase[0],
        observer=watch,
    )  # fmt: skip
    for count, name in ((4, "decode"), (3, "prefill"), (4, "prefill"), (3, "decode"), (8, "decode"), (9, "prefill")):
        phase[0] = name
        given = inputs(count)
        torch.testing.assert_close(program(*given), model(*given))
    assert [(e.phase, e.form, e.size, e.num_tokens, e.reason) for e in watch.of(Replayed)] == [
        ("decode", "full", 4, 4, "exact"),
        ("prefill", "piecewise", 4, 3, "padded"),
        ("prefill", "piecewise", 4, 4, "exact"),
        ("decode", "full", 4, 3, "padded"),
    ]
    assert [(e.phase, e.num_tokens, e.reason) for e in watch.of(Uncovered)] == [
        ("decode", 8, "no captured size serves 8 tokens"), ("prefill", 9, "no captured size serves 9 tokens")
    ]  # fmt: skip
    assert program.counts["decode", "uncovered"] == 1


def test_piecewise_capture_of_a_program_without_cuts_is_refused() -> None:
    model = toy()
    program = compiled(model, mode="trace_once")
    with pytest.raises(
        CaptureError, match="decode cannot be captured `piecewise`: the program holds no opaque operator"
    ):
        captured(model, program=program, decode="piecewise")


def test_inside_another_capture_a_captured_program_is_only_what_it_was_made_of() -> None:
    from piecework.seam.dry import DryDevice

    device, model = DryDevice(), toy()
    program = captured(model, decode="piecewise", device=device, decode_sizes=(4,))
    given = inputs(4)
    with device.session(), torch.no_grad():
        device.begin()
        result = device.alias(program(*given))
        graph = device.end()
    assert graph is not None
    assert program.counts == {}
    graph.replay()
    torch.testing.assert_close(result, model(*given))
