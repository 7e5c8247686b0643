"""Cases in which captured programs go wrong elsewhere, on a dry device; each beside a broken twin that shows it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from capture_toys import WIDTH, captured, compiled, operator
from piecework.capture_events import Lowered, Moved
from piecework.errors import CaptureError, InputError
from piecework.events import Recorder
from piecework.ops.count import true_count
from piecework.runtime.captured import Borrowed
from piecework.runtime.segments import CopyingCall
from piecework.seam.dry import DryDevice

ROWS = {"x": {0: "tokens"}}
LENGTHS = {"longest": 1}


def _count(x: Tensor) -> Tensor:
    return x * true_count(x.shape[0])


def _padded_count(x: Tensor) -> Tensor:
    return x * x.shape[0]


def _decide(x: Tensor) -> Tensor:
    return x * (1 + LENGTHS["longest"] // 1000)


def _noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


operator("count(Tensor x) -> Tensor", _count, torch.empty_like, support="never")
operator("padded_count(Tensor x) -> Tensor", _padded_count, torch.empty_like, support="never")
operator("decide(Tensor x) -> Tensor", _decide, torch.empty_like, support="never")
operator("decide_claimed(Tensor x) -> Tensor", _decide, torch.empty_like, support="always")  # it lies
operator("noise(Tensor x) -> Tensor", _noise, torch.empty_like, support="always")


class Rows(torch.nn.Module):
    """A product of rows with an operator of the tests between."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.name = name

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = getattr(torch.ops.capture_toys, self.name)(x @ self.weight)
        return torch.relu(x) + 1 if bias is None else torch.relu(x) + bias


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def replaying(name: str, capture: str, **options: Any) -> tuple[Rows, Any]:
    """Capture a model of rows that was never traced: its operators stand outside the graphs, or in one."""
    model = Rows(name)
    return model, captured(model, mode="none", example=(rows(4),), dynamic=ROWS, decode=capture, **options)


class Derived(torch.nn.Module):
    """A weight kept transposed, as a hook after loading makes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.w = torch.nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.derive()

    def derive(self) -> None:
        self.wt = self.w.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.capture_toys.fresh(x @ self.wt)


@pytest.mark.parametrize(("mode", "capture"), [("piecewise", "piecewise"), ("piecewise", "full"), ("none", "full")])
def test_c21_a_derived_weight_built_again_is_named_and_copied_in_place(mode: str, capture: str) -> None:
    model, x, seen = Derived(), rows(4), Recorder()
    program = None if mode == "none" else compiled(model, (x,), dynamic=ROWS)
    replayed = captured(
        model, mode=mode, program=program, example=(x,), dynamic=ROWS, decode=capture, observer=seen,
        decode_sizes=(4,),
    )  # fmt: skip
    torch.testing.assert_close(replayed(x), model(x))
    model.w.mul_(2)
    model.derive()
    with pytest.raises(CaptureError, match=r"graphs read memory that has moved since they were captured: `wt \(replac"):
        replayed(x)
    assert [event.names for event in seen.of(Moved)] == [("wt (replaced)",)]
    assert replayed.verify_addresses() == ("wt (replaced)",)
    done = replayed.refresh()
    assert (done.copied, done.recaptured) == (("wt",), ())
    torch.testing.assert_close(replayed(x), model(x))
    assert replayed.verify_addresses() == ()


def test_c21_twin_without_the_check_of_addresses_the_old_weight_is_read() -> None:
    model, x = Derived(), rows(4)
    replayed = captured(
        model, mode="none", example=(x,), dynamic=ROWS, decode="full", decode_sizes=(4,), check_addresses=False
    )
    model.w.mul_(2)
    model.derive()
    assert not torch.allclose(replayed(x), model(x))


@pytest.mark.parametrize("capture", ["piecewise", "full"])
def test_c23_nothing_of_an_earlier_step_is_read_from_static_inputs(capture: str) -> None:
    model = Rows("fresh")
    program = compiled(model, (rows(4),), dynamic=ROWS)
    replayed = captured(model, program=program, decode=capture)
    for count in (8, 3, 5, 1, 7):
        for size in (1, 2, 4, 8):
            replayed.inputs.poison(size)
        found = replayed(rows(count, count))
        assert not found.isnan().any()
        torch.testing.assert_close(found, model(rows(count, count)))


def test_c23_twin_an_input_that_is_not_copied_shows_as_nan() -> None:
    class Forgetful(DryDevice):
        def copy_together(self, targets: list[Tensor], sources: list[Tensor]) -> None:
            return None

    model = Rows("fresh")
    program = compiled(model, (rows(4),), dynamic=ROWS)
    replayed = captured(model, program=program, decode="piecewise", device=Forgetful())
    replayed.inputs.poison(8)
    assert replayed(rows(8)).isnan().all()


@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_c23_an_optional_input_that_was_there_at_capture_and_is_missing_raises(mode: str) -> None:
    model, bias = Rows("fresh"), torch.ones(WIDTH)
    example = (rows(4), bias)
    program = compiled(model, example, dynamic=ROWS) if mode == "piecewise" else None
    capture = "piecewise" if mode == "piecewise" else "breakable"
    replayed = captured(model, mode=mode, program=program, example=example, dynamic=ROWS, decode=capture)
    torch.testing.assert_close(replayed(rows(3), bias * 5), model(rows(3), bias * 5))
    with pytest.raises(InputError, match="bias"):
        replayed(rows(3), None)
    with pytest.raises(TypeError, match="bias"):
        replayed(rows(3))
    absent = captured(model, mode="none", example=(rows(4),), dynamic=ROWS, decode="breakable", decode_sizes=(4,))
    with pytest.raises(InputError, match="bias"):
        absent(rows(4), bias)


def test_c23_a_body_is_told_how_many_rows_are_real() -> None:
    model, replayed = replaying("count", "breakable", decode_sizes=(8,))
    for count in (8, 3, 1):
        torch.testing.assert_close(replayed(rows(count)), model(rows(count)))


def test_c23_twin_a_body_that_counts_the_padded_rows_is_wrong() -> None:
    model, replayed = replaying("padded_count", "breakable", decode_sizes=(8,))
    torch.testing.assert_close(replayed(rows(8)), model(rows(8)))
    assert not torch.allclose(replayed(rows(3)), model(rows(3)))


class Mixes(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.capture_toys.fresh(x) + x.sum(0)


def test_c23_a_model_whose_rows_follow_later_ones_is_not_padded() -> None:
    example = (rows(4),)
    with pytest.raises(CaptureError, match="padding would change real rows"):
        captured(Mixes(), mode="none", example=example, dynamic=ROWS, decode="breakable", decode_sizes=(2, 8))
    # Twin: where no count is padded, nothing is wrong with such a model.
    exact = captured(Mixes(), mode="none", example=example, dynamic=ROWS, decode="breakable", decode_sizes=(1, 2, 3))
    torch.testing.assert_close(exact(rows(3)), Mixes()(rows(3)))


@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_c33_fresh_results_of_an_opaque_operator_reach_the_next_graph(mode: str) -> None:
    model = Rows("fresh")
    program = compiled(model, (rows(4),), dynamic=ROWS) if mode == "piecewise" else None
    capture = "piecewise" if mode == "piecewise" else "breakable"
    replayed = captured(model, mode=mode, program=program, example=(rows(4),), dynamic=ROWS, decode=capture)
    kept = []
    for seed in range(6):
        kept.append(torch.randn(seed + 1, WIDTH))  # what is allocated between moves what the operator returns
        torch.testing.assert_close(replayed(rows(4, seed)), model(rows(4, seed)))


def without_copies(program: Any, key: tuple[str, int]) -> None:
    """Make a size as it would be if what an operator returns were not copied to where the next graph reads."""
    made = program.sizes[key]
    segments = [partial(s.call, *s.arguments) if isinstance(s, CopyingCall) else s for s in made.segments]
    assert segments != list(made.segments)
    program.sizes[key] = replace(made, segments=tuple(segments))


def test_c33_twin_without_the_copy_the_poison_is_read() -> None:
    program = compiled(Rows("fresh"), (rows(4),), dynamic=ROWS)
    replayed = captured(Rows("fresh"), program=program, decode="piecewise", decode_sizes=(4,))
    without_copies(replayed, ("decode", 4))
    assert replayed(rows(4)).isnan().any()


def test_poison_is_what_shows_it() -> None:
    class Mild(DryDevice):
        def before_step(self) -> None:
            return None

    program = compiled(Rows("fresh"), (rows(4),), dynamic=ROWS)
    replayed = captured(Rows("fresh"), program=program, decode="piecewise", decode_sizes=(4,), device=Mild())
    replayed(rows(4, 1))
    without_copies(replayed, ("decode", 4))
    stale = replayed(rows(4, 2))
    assert not stale.isnan().any()
    torch.testing.assert_close(stale, Rows("fresh")(rows(4, 1)))


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
