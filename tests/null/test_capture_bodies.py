"""Opaque bodies and results in captured programs, where they go wrong elsewhere; each case beside a broken twin."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from capture_rows import LENGTHS, ROWS, Rows, replaying, rows
from capture_toys import captured, compiled
from piecework.capture_events import Lowered
from piecework.errors import CaptureError
from piecework.events import Recorder
from piecework.runtime.captured import Borrowed
from piecework.seam.dry import DryDevice


def test_c58_full_capture_with_an_operator_that_may_not_be_captured_is_refused() -> None:
    model = Rows("count")
    program = compiled(model, (rows(4),), dynamic=ROWS)
    with pytest.raises(CaptureError) as caught:
        captured(model, program=program, decode="full")
    assert "decode cannot be captured `full`: `capture_toys::count` (never)" in caught.value.message
    with pytest.raises(CaptureError, match="`capture_toys::count` \\(never\\)"):
        replaying("count", "full")
    # Twin: an operator that supports it is captured.
    fine = Rows("noise")
    captured(fine, program=compiled(fine, (rows(4),), dynamic=ROWS), decode="full", decode_sizes=(4,))


def test_c58_what_is_lowered_on_request_is_an_event_and_stands_in_explain() -> None:
    model, seen = Rows("count"), Recorder()
    program = compiled(model, (rows(4),), dynamic=ROWS)
    replayed = captured(model, program=program, decode="full", lower=True, decode_sizes=(4,), observer=seen)
    (event,) = seen.of(Lowered)
    assert (event.asked, event.capture, event.operators) == ("full", "piecewise", ("capture_toys::count",))
    assert str(replayed.explain()[0]) == "decode 1-4: piecewise, size 4, 75% padding at most; captured"
    assert str(replayed.explain()[1]) == "decode 5-64: without graphs: no captured size serves them"
    assert str(replayed.explain()[2]).startswith("prefill 1-64: without graphs: ")
    torch.testing.assert_close(replayed(rows(3)), model(rows(3)))


def test_c59_results_of_earlier_calls_stay_as_they_were() -> None:
    model, replayed = replaying("fresh", "full", decode_sizes=(4,))
    first = replayed(rows(4, 1))
    kept = first.clone()
    second = replayed(rows(4, 2))
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
    torch.testing.assert_close(replayed(replayed(rows(4))), model(model(rows(4))))


def test_c59_borrowed_results_expire_with_the_next_step() -> None:
    model, replayed = replaying("fresh", "full", decode_sizes=(4,), results="borrowed")
    first = replayed(rows(4, 1))
    assert isinstance(first, Borrowed)
    memory = first.value
    torch.testing.assert_close(memory, model(rows(4, 1)))
    replayed(rows(4, 2))
    with pytest.raises(CaptureError, match="a borrowed result was read after the next step had begun"):
        _ = first.value
    # Twin: the memory itself, kept all the same, holds the next step's numbers.
    torch.testing.assert_close(memory, model(rows(4, 2)))


def test_c61_a_decision_on_the_host_is_taken_anew_at_each_replay() -> None:
    LENGTHS["longest"] = 1
    model, replayed = replaying("decide", "breakable", decode_sizes=(4,))
    for longest in (1, 5000, 2500):
        LENGTHS["longest"] = longest
        torch.testing.assert_close(replayed(rows(4)), model(rows(4)))
    with pytest.raises(CaptureError, match="`capture_toys::decide` \\(never\\) may not stand inside its graph"):
        replaying("decide", "full")


def test_c61_twin_an_operator_that_claims_support_it_lacks_keeps_the_decision_of_the_capture() -> None:
    LENGTHS["longest"] = 1
    model, replayed = replaying("decide_claimed", "full", decode_sizes=(4,))
    torch.testing.assert_close(replayed(rows(4)), model(rows(4)))
    LENGTHS["longest"] = 5000
    assert not torch.allclose(replayed(rows(4)), model(rows(4)))
    LENGTHS["longest"] = 1


@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_c62_an_operator_that_waits_for_the_device_is_named_and_all_works_afterwards(mode: str) -> None:
    model, device = Rows("pick"), DryDevice()
    program = compiled(model, (rows(4),), dynamic=ROWS) if mode == "piecewise" else None
    sizes = (1, 2, 3, 4)  # it sums over its rows, so none may be padded
    given = {"mode": mode, "program": program, "example": (rows(4),), "dynamic": ROWS, "decode_sizes": sizes}
    with pytest.raises(CaptureError) as caught:
        captured(model, device=device, decode="full", **given)
    assert "capture of size 4 of decode (`full`) failed at `" in caught.value.message
    assert "capture_toys::pick" in caught.value.message
    assert "operation not permitted when stream is capturing" in caught.value.message
    assert not device.is_capturing()
    torch.testing.assert_close(model(rows(4)), model(rows(4)))
    capture = "piecewise" if mode == "piecewise" else "breakable"
    again = captured(model, device=device, decode=capture, **given)
    torch.testing.assert_close(again(rows(4)), model(rows(4)))


def test_c62_random_numbers_are_new_at_each_replay() -> None:
    _, replayed = replaying("noise", "full", decode_sizes=(4,))
    assert not torch.equal(replayed(rows(4)), replayed(rows(4)))


def test_c62_twin_a_number_drawn_on_the_host_is_frozen() -> None:
    class HostNoise(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random()

    replayed = captured(HostNoise(), mode="none", example=(rows(4),), dynamic=ROWS, decode="full", decode_sizes=(4,))
    assert torch.equal(replayed(rows(4)), replayed(rows(4)))
