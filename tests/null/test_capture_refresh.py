"""Weights that come anew: what a captured program notices, what it mends, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from capture_toys import DYNAMIC, captured, compiled, inputs, toy
from piecework.capture_options import CaptureOptions
from piecework.errors import CaptureError, OptionError
from piecework.seam.dry import DryDevice
from piecework.stages.capture import capture, program_source
from piecework.store.memory import MemoryStore

PLAN = CaptureOptions(decode="piecewise", decode_sizes=(4, 8), prefill="none").resolve("dry", "piecewise", 64)


def scaled(model: nn.Module, factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("is_model_named", [True, False])
def test_a_program_that_is_refreshed_is_noticed_and_mended_in_place(is_model_named: bool) -> None:
    model = toy()
    program = compiled(model)
    owners = {"": model} if is_model_named else None
    replayed = capture(program_source(program), PLAN, DryDevice(), owners=owners)
    given = inputs(4)
    before = replayed(*given)
    program.refresh(scaled(model, 1.5))
    expected = program(*given)
    assert not torch.allclose(before, expected)
    with pytest.raises(CaptureError, match=r"moved since they were captured: .*`program\.head\.weight \(replaced\)`"):
        replayed(*given)
    # What no graph serves runs on the new weights at once.
    torch.testing.assert_close(replayed(*inputs(20)), program(*inputs(20)))
    done = replayed.refresh()
    assert "program.head.weight" in done.copied
    assert done.recaptured == ()
    torch.testing.assert_close(replayed(*given), expected)
    torch.testing.assert_close(program(*given), expected)
    # The program and its graphs have one memory again: what is written there in place is seen by both.
    program.weights["head.weight"].mul_(2)
    torch.testing.assert_close(replayed(*given), program(*given))
    assert not torch.allclose(program(*given), expected)
    assert replayed.verify_addresses() == ()


def test_twin_without_the_check_the_graphs_read_the_weights_of_before() -> None:
    model = toy()
    program = compiled(model)
    plan = CaptureOptions(decode="piecewise", decode_sizes=(4,), prefill="none", check_addresses=False)
    replayed = capture(program_source(program), plan.resolve("dry", "piecewise", 64), DryDevice())
    before = replayed(*inputs(4))
    program.refresh(scaled(model, 1.5))
    torch.testing.assert_close(replayed(*inputs(4)), before)
    assert not torch.allclose(before, program(*inputs(4)))


def test_a_refresh_that_changes_no_memory_is_no_move() -> None:
    model = toy()
    program = compiled(model)
    replayed = capture(program_source(program), PLAN, DryDevice())
    program.refresh()
    torch.testing.assert_close(replayed(*inputs(4)), model(*inputs(4)))
    model.head.weight = nn.Parameter(model.head.weight.data, requires_grad=False)
    torch.testing.assert_close(replayed(*inputs(4)), model(*inputs(4)))


def test_no_further_size_is_captured_over_other_memory_than_the_first() -> None:
    model = toy()
    program = compiled(model)
    plan = CaptureOptions(decode="full", decode_sizes=(4, 8), prefill="none", when="idle")
    replayed = capture(program_source(program), plan.resolve("dry", "piecewise", 64), DryDevice())
    replayed.capture("decode", 8)
    program.refresh(scaled(model, 1.5))
    with pytest.raises(CaptureError, match="moved since they were captured"):
        replayed.capture("decode", 4)
    replayed.recapture()
    replayed.capture("decode", 4)
    for count in (4, 8, 3):
        torch.testing.assert_close(replayed(*inputs(count)), program(*inputs(count)))


def test_a_weight_of_another_shape_is_refused_and_a_table_of_another_shape_is_captured_anew() -> None:
    model = toy()
    replayed = captured(model, decode="full", decode_sizes=(4,))
    old = model.head.weight
    model.head.weight = nn.Parameter(torch.randn(5, 8), requires_grad=False)
    with pytest.raises(CaptureError, match=r"`head\.weight` does not fit the memory that the program was bound to"):
        replayed.refresh()
    model.head.weight = old
    torch.testing.assert_close(replayed(*inputs(4)), model(*inputs(4)))
    own = captured(model, mode="none", decode="full", decode_sizes=(4,))
    model.cache = torch.zeros(3)
    torch.testing.assert_close(own(*inputs(4)), model(*inputs(4)))


class Branches(nn.Module):
    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = (ids * positions).float()
        return x + 1 if ids.shape[0] > 16 else x - 1


def test_a_program_of_several_traces_is_refused_with_what_each_serves() -> None:
    program = compiled(Branches())
    assert len(program.sides) == 2
    with pytest.raises(CaptureError) as caught:
        program_source(program)
    assert "the model branches on sizes, so the program serves them by `2` traces: " in caught.value.message
    assert "16" in caught.value.message
    assert "17" in caught.value.message


def test_a_program_of_several_variants_is_refused() -> None:
    class Optional(nn.Module):
        def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
            return ids * 2 if positions is None else ids * positions

    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)
    program = pw.compile(
        Optional(), [{"ids": inputs(4)[0]}, dict(zip(("ids", "positions"), inputs(4), strict=True))],
        dynamic=DYNAMIC, options=options, store=MemoryStore(),
    )  # fmt: skip
    with pytest.raises(CaptureError, match="the program has `2` variants"):
        program_source(program)
    one = program.variants[1]
    plan = CaptureOptions(decode="full", decode_sizes=(4,), prefill="none").resolve("dry", "trace_once", 64)
    replayed = capture(program_source(one), plan, DryDevice())
    torch.testing.assert_close(replayed(*inputs(4)), program(*inputs(4)))


def test_pw_capture_takes_a_program_or_a_model() -> None:
    model = toy()
    options = pw.CaptureOptions(decode="piecewise", decode_sizes=(4, 8), prefill="none")
    replayed = pw.capture(compiled(model), options=options, device="dry")
    torch.testing.assert_close(replayed(*inputs(3)), model(*inputs(3)))
    assert replayed.counts == {("decode", "piecewise"): 1}
    model.head.weight = nn.Parameter(model.head.weight * 2, requires_grad=False)
    with pytest.raises(CaptureError, match=r"`head\.weight \(replaced\)`"):
        replayed(*inputs(3))
    options = pw.CaptureOptions(decode="breakable", decode_sizes=(4, 8), prefill="none")
    never_traced = pw.capture(
        model, inputs(4), dynamic=DYNAMIC, max_num_batched_tokens=64, options=options, device="dry"
    )
    torch.testing.assert_close(never_traced(*inputs(3)), model(*inputs(3)))
    assert never_traced.counts == {("decode", "breakable"): 1}


def test_pw_capture_refuses_by_name_what_it_cannot_do() -> None:
    model = toy()
    program = compiled(model)
    with pytest.raises(OptionError, match="on `cpu` nothing is captured: there are no CUDA graphs"):
        pw.capture(program)
    with pytest.raises(OptionError, match="device `tpu` cannot record graphs"):
        pw.capture(program, device="tpu")
    with pytest.raises(OptionError, match="a program on `cpu` cannot be captured on `cuda`"):
        pw.capture(program, device="cuda")
    with pytest.raises(OptionError, match="`example_inputs` is missing"):
        pw.capture(model, device="dry")
    with pytest.raises(OptionError, match="`dynamic` has no meaning for a program"):
        pw.capture(program, dynamic=DYNAMIC, device="dry")
    chosen = pw.CaptureOptions(decode="piecewise", decode_compiler="eager", prefill="none")
    with pytest.raises(OptionError, match="`decode_compiler` has no meaning here: what is captured was compiled"):
        pw.capture(program, options=chosen, device="dry")
