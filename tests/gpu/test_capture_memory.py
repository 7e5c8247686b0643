"""On a GPU: what graphs take is predicted, measured, held under a budget, and given back."""

from __future__ import annotations

import gc

import pytest
import torch

from gpu.capture_setup import SIZES, captured, compiled, make_model, make_step, run
from piecework.capture_events import Captured, CaptureSkipped
from piecework.events import Recorder
from piecework.seam.cuda import CudaDevice

pytestmark = pytest.mark.gpu


def test_the_pool_of_all_sizes_is_hardly_more_than_the_largest_needs() -> None:
    model, step = make_model(), make_step()
    program = compiled(model)
    one, every = CudaDevice(), CudaDevice()
    alone = captured(model, step, program=program, device=one, decode="piecewise", decode_sizes=(64,))
    together = captured(model, step, program=program, device=every, decode="piecewise", decode_sizes=SIZES)
    print("pool bytes", one.pool_bytes(), every.pool_bytes(), "used", one.used_bytes(), every.used_bytes())
    assert every.pool_bytes() <= 1.15 * one.pool_bytes() + (2 << 20)
    del alone, together


def test_release_gives_back_and_recapture_restores() -> None:
    model, step = make_model(), make_step()
    program = compiled(model)
    run(program, step, 64, 0)
    torch.cuda.synchronize()
    gc.collect()  # programs of earlier tests are cycles
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    replayed = captured(model, step, program=program, decode="full")
    expected = run(replayed, step, 8, 3).clone()
    held = torch.cuda.memory_reserved()
    replayed.release()
    gc.collect()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    print("reserved", before, held, after)
    assert after <= before + (4 << 20)
    assert not replayed.sizes
    replayed.recapture()
    assert torch.equal(run(replayed, step, 8, 3), expected)


def test_sizes_beyond_the_budget_are_named_and_not_attempted() -> None:
    model, step, watch = make_model(), make_step(), Recorder()
    replayed = captured(model, step, decode="full", memory_budget_bytes=1, observer=watch)
    assert [event.size for event in watch.of(CaptureSkipped)] == sorted(SIZES, reverse=True)
    assert not watch.of(Captured)
    assert "does not fit the memory budget" in replayed.refused["decode", 64]


def test_bytes_are_predicted() -> None:
    model, step, watch = make_model(), make_step(), Recorder()
    captured(model, step, decode="full", observer=watch)
    events = watch.of(Captured)
    for event in events:
        print(event.size, event.predicted_bytes, event.size_bytes)
    total = sum(event.size_bytes for event in events)
    assert total <= sum(event.predicted_bytes for event in events) + (32 << 20)
