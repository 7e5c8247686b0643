"""What captured sizes hold, cost and cover: memory, budget, release, capture on first use and in idle time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from capture_toys import captured, compiled, inputs, toy
from piecework.capture_events import Captured, CaptureFailed, CaptureSkipped, Released, Uncovered
from piecework.errors import CaptureError
from piecework.events import Recorder
from piecework.runtime.permission import no_capture
from piecework.seam.dry import DryDevice
from piecework.span_events import SubPhase
from piecework.values.tree import map_leaves


def agree(replayed: Any, model: Any, counts: Sequence[int] = (1, 2, 3, 4, 5, 7, 8)) -> bool:
    return all(torch.allclose(replayed(*inputs(n, n)), model(*inputs(n, n)), equal_nan=False) for n in counts)


class Holding(DryDevice):
    """A twin: what the last outputs lie in is held for good."""

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor


class LettingGo(DryDevice):
    """A twin: what a piece returns is held by its address alone within a size too."""

    def run(self, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        kept = super().run(call, arguments)
        return map_leaves(lambda _, leaf: self.alias(leaf) if isinstance(leaf, Tensor) else leaf, kept, "result")


def test_all_sizes_fit_in_the_pool_of_the_largest() -> None:
    model = toy()
    program, alone, together = compiled(model), DryDevice(), DryDevice()
    captured(model, program=program, device=alone, decode="piecewise", decode_sizes=(64,))
    sizes = (1, 2, 4, 8, 16, 32, 64)
    kept = captured(model, program=program, device=together, decode="piecewise", decode_sizes=sizes)
    assert together.pool_bytes() <= 1.15 * alone.pool_bytes()
    assert [size for _, size in kept.sizes] == sorted(sizes, reverse=True)


def test_twin_outputs_that_are_held_make_the_pool_grow() -> None:
    model = toy()
    program, alone, together = compiled(model), Holding(), Holding()
    one = captured(model, program=program, device=alone, decode="piecewise", decode_sizes=(64,))
    sizes = (1, 2, 4, 8, 16, 32, 64)
    every = captured(model, program=program, device=together, decode="piecewise", decode_sizes=sizes)
    assert together.pool_bytes() > 1.15 * alone.pool_bytes()
    assert one.sizes and every.sizes


def test_within_a_size_all_but_the_last_output_are_held() -> None:
    model = toy(is_fresh=True)
    assert agree(captured(model, decode="piecewise"), model)


def test_twin_values_that_are_let_go_too_early_are_overwritten() -> None:
    model = toy(is_fresh=True)
    assert not agree(captured(model, decode="piecewise", device=LettingGo()), model)


def test_the_first_graph_alone_collects_garbage_and_none_is_collected_while_recording() -> None:
    model, device = toy(), DryDevice()
    collected: list[bool] = []

    def look(phase: str, generation: dict[str, int]) -> None:
        if phase == "start":
            collected.append(device.is_capturing())

    gc.callbacks.append(look)
    try:
        captured(model, decode="piecewise", device=device, decode_sizes=(1, 2, 4, 8))
    finally:
        gc.callbacks.remove(look)
    assert device.collections == 1
    assert collected
    assert not any(collected)
    assert gc.isenabled()


def test_sizes_beyond_the_budget_are_named_and_not_attempted() -> None:
    model, seen = toy(), Recorder()
    replayed = captured(
        model, decode="full", decode_sizes=(1, 2), memory_budget_bytes=1, observer=seen, program=compiled(model)
    )
    assert [(e.phase, e.size, e.budget_bytes) for e in seen.of(CaptureSkipped)] == [("decode", 2, 1), ("decode", 1, 1)]
    assert all(e.predicted_bytes > 1 for e in seen.of(CaptureSkipped))
    assert not seen.of(Captured)
    assert [str(row) for row in replayed.explain()[:2]] == [
        "decode 1: without graphs: size 1 does not fit the memory budget",
        "decode 2: without graphs: size 2 does not fit the memory budget",
    ]
    torch.testing.assert_close(replayed(*inputs(2)), model(*inputs(2)))
    assert [e.reason for e in seen.of(Uncovered)] == ["size 2 does not fit the memory budget"]
    # Twin: a budget that holds both.
    both = captured(model, decode="full", decode_sizes=(1, 2), memory_budget_bytes=1 << 24)
    assert set(both.sizes) == {("decode", 1), ("decode", 2)}


def test_a_size_that_is_not_covered_is_an_event_and_a_count() -> None:
    model, seen = toy(), Recorder()
    replayed = captured(model, decode="full", decode_sizes=(2,), observer=seen)
    for count in (9, 2, 9):
        torch.testing.assert_close(replayed(*inputs(count)), model(*inputs(count)))
    assert replayed.counts == {("decode", "uncovered"): 2, ("decode", "full"): 1}
    assert [(e.num_tokens, e.reason) for e in seen.of(Uncovered)] == [(9, "no captured size serves 9 tokens")] * 2


def test_release_gives_all_back_and_recapture_restores_it() -> None:
    model, device, seen = toy(), DryDevice(), Recorder()
    replayed = captured(model, decode="piecewise", device=device, observer=seen)
    held = device.used_bytes()
    sizes = set(replayed.sizes)
    replayed.release()
    assert held > 0
    assert [event.size_bytes for event in seen.of(Released)] == [held]
    assert (device.used_bytes(), replayed.inputs.size_bytes, replayed.sizes) == (0, 0, {})
    torch.testing.assert_close(replayed(*inputs(4)), model(*inputs(4)))
    assert replayed.counts == {("decode", "uncovered"): 1}
    replayed.recapture()
    assert set(replayed.sizes) == sizes
    assert device.used_bytes() == held
    assert agree(replayed, model)
    assert replayed.counts["decode", "uncovered"] == 1


def test_idle_time_captures_the_largest_first_and_keeps_to_its_budget() -> None:
    model, seen = toy(), Recorder()
    replayed = captured(model, decode="full", when="idle", observer=seen)
    assert replayed.pending == (("decode", 8), ("decode", 4), ("decode", 2), ("decode", 1))
    torch.testing.assert_close(replayed(*inputs(8)), model(*inputs(8)))
    assert [e.reason for e in seen.of(Uncovered)] == ["size 8 is not captured yet"]
    assert replayed.capture_some(0) == (("decode", 8),)  # the first is tried whatever it takes
    assert replayed.capture_some(1e6) == (("decode", 4), ("decode", 2), ("decode", 1))
    assert replayed.capture_some(1e6) == ()
    assert agree(replayed, model)


def test_the_first_use_captures_a_size_and_a_failure_leaves_it_to_the_program() -> None:
    model, seen = toy(), Recorder()
    replayed = captured(model, decode="full", when="first_use", decode_sizes=(1, 4), observer=seen)
    assert not replayed.sizes
    torch.testing.assert_close(replayed(*inputs(3)), model(*inputs(3)))
    assert set(replayed.sizes) == {("decode", 4)}
    assert not seen.of(Uncovered)
    failing = captured(
        model, decode="full", when="first_use", device=DryDevice(pool_bytes=1024), decode_sizes=(4,), observer=seen
    )
    torch.testing.assert_close(failing(*inputs(4)), model(*inputs(4)))
    (failed,) = seen.of(CaptureFailed)
    assert "the dry pool is full" in failed.reason
    assert [e.reason for e in seen.of(Uncovered)] == [failed.reason]


def test_capture_where_it_is_forbidden_raises() -> None:
    model = toy()
    idle = captured(model, decode="full", when="idle")
    with no_capture("serving"):
        for attempt in (lambda: idle.capture_some(10), lambda: idle.capture("decode", 4), idle.recapture):
            with pytest.raises(CaptureError, match="may not be captured now: serving"):
                attempt()
        with pytest.raises(CaptureError, match="may not be captured now: serving"):
            captured(model, decode="full")
        lazy = captured(model, decode="full", when="first_use")
        torch.testing.assert_close(lazy(*inputs(4)), model(*inputs(4)))
        assert not lazy.sizes
    idle.capture("decode", 4)
    assert set(idle.sizes) == {("decode", 4)}


def test_a_size_is_warmed_up_once_for_both_forms() -> None:
    model, seen = toy(), Recorder()
    phase = ["decode"]
    replayed = captured(
        model, decode="full", prefill="piecewise", prefill_sizes=(2, 4, 8), phase_of=lambda: phase[0], observer=seen
    )
    warmed = [event for event in seen.of(SubPhase) if event.name == "warm-up run"]
    assert len(seen.of(Captured)) == 7 and len(warmed) == 4
    for phase[0] in ("decode", "prefill"):
        assert agree(replayed, model, (2, 3, 4, 5, 7, 8))
