"""Capture and replay on a real GPU: equal to the uncaptured program bit for bit, whatever comes between."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gpu.capture_setup import MOST, SIZES, captured, churn, compiled, make_model, make_step, run
from piecework.capture_events import Captured, Replayed, Uncovered
from piecework.errors import CaptureError
from piecework.events import Recorder
from piecework.seam.cuda import CudaDevice
from piecework.values.phases import TABLE

pytestmark = pytest.mark.gpu

LEGAL = [pair for pair, why in sorted(TABLE.items()) if not why and pair[0] != "stock" and pair[1] != "none"]


def uncaptured(model: Any, mode: str, program: Any) -> Any:
    return model if mode == "none" else program


@pytest.mark.parametrize("is_fresh", [False, True], ids=["written", "returned"])
@pytest.mark.parametrize(("mode", "capture"), LEGAL)
def test_replay_equals_the_uncaptured_program_bit_for_bit(mode: str, capture: str, is_fresh: bool) -> None:
    model, step = make_model(is_fresh=is_fresh), make_step()
    program = None if mode == "none" else compiled(model, "inductor", mode=mode)
    replayed = captured(model, step, mode=mode, program=program, decode=capture)
    plain = uncaptured(model, mode, program)
    order = list(SIZES) * 4
    random.Random(1).shuffle(order)
    for seed, count in enumerate(order):
        expected = run(plain, step, count, seed).clone()
        churn()
        got = run(replayed, step, count, seed)
        churn()
        assert torch.equal(got, expected), f"size {count}, step {seed}: {(got - expected).abs().max()}"
    assert replayed.counts["decode", capture] == len(order)
    assert replayed.verify_addresses() == ()


@pytest.mark.parametrize("capture", ["full", "piecewise"])
def test_padded_steps_agree_with_the_program_and_hold_no_number_of_padding(capture: str) -> None:
    model, step = make_model(dtype=torch.float32), make_step(torch.float32)
    program = compiled(model)
    replayed = captured(model, step, program=program, decode=capture)
    for count in (3, 5, 7, 9, 17, 33, 63):
        expected = run(program, step, count, count).clone()
        got = run(replayed, step, count, count)
        assert got.shape == expected.shape
        error = ((got - expected).norm() / expected.norm()).item()
        assert error < 1e-4, (count, error)


def test_forms_side_by_side_say_which_served() -> None:
    model, step, phase, watch = make_model(), make_step(), ["decode"], Recorder()
    program = compiled(model)
    replayed = captured(
        model, step, program=program, decode="full", prefill="piecewise", prefill_sizes=(8, 64), decode_sizes=(8, 32),
        phase_of=lambda: phase[0], observer=watch,
    )  # fmt: skip
    for name, count in (("decode", 8), ("prefill", 8), ("prefill", 30), ("decode", 30), ("decode", 40)):
        phase[0] = name
        expected = run(program, step, count, count).clone()
        got = run(replayed, step, count, count)
        assert ((got - expected).norm() / expected.norm()).item() < 0.05
    assert [(e.phase, e.form, e.size) for e in watch.of(Replayed)] == [
        ("decode", "full", 8), ("prefill", "piecewise", 8), ("prefill", "piecewise", 64), ("decode", "full", 32)
    ]  # fmt: skip
    assert [(e.phase, e.num_tokens) for e in watch.of(Uncovered)] == [("decode", 40)]
    print(
        [
            (e.phase, e.size, e.graphs, e.segments, e.predicted_bytes, e.size_bytes, round(e.elapsed_s * 1e3, 1))
            for e in watch.of(Captured)
        ]
    )


def test_results_belong_to_the_caller() -> None:
    model, step = make_model(), make_step()
    replayed = captured(model, step, decode="full", decode_sizes=(4,))
    first = run(replayed, step, 4, 1)
    kept = first.clone()
    for seed in range(2, 6):
        run(replayed, step, 4, seed)
        churn()
    assert torch.equal(first, kept)


def test_borrowed_results_expire() -> None:
    model, step = make_model(), make_step()
    replayed = captured(model, step, decode="full", decode_sizes=(4,), results="borrowed")
    first: Any = run(replayed, step, 4, 1)
    assert first.value.shape[0] == 4
    run(replayed, step, 4, 2)
    with pytest.raises(CaptureError, match="borrowed result was read after the next step"):
        _ = first.value


def test_capture_on_first_use_and_in_idle_time() -> None:
    model, step = make_model(), make_step()
    program = compiled(model)
    lazy = captured(model, step, program=program, decode="full", decode_sizes=(2, 8), when="first_use")
    assert not lazy.sizes
    assert torch.equal(run(lazy, step, 8, 1), run(program, step, 8, 1))
    assert list(lazy.sizes) == [("decode", 8)]
    idle = captured(model, step, program=program, decode="full", decode_sizes=SIZES, when="idle")
    assert idle.capture_some(0) == (("decode", MOST),)
    while idle.pending:
        assert idle.capture_some(50)
    assert torch.equal(run(idle, step, 2, 1), run(program, step, 2, 1))


def test_inside_a_capture_of_the_callers_own_it_is_the_plain_program() -> None:
    model, step = make_model(), make_step()
    program = compiled(model)
    replayed = captured(model, step, program=program, decode="piecewise", decode_sizes=(4,))
    expected = run(program, step, 4, 5).clone()
    run(replayed, step, 4, 5)
    device = CudaDevice()
    from gpu.capture_setup import inputs_of

    ids, positions = inputs_of(4, 5)
    from benchmarks.llama_shape import metadata

    with metadata(step), torch.no_grad(), device.session():
        device.begin()
        result = replayed(ids, positions)
        graph = device.end()
    assert graph is not None
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
