"""On a GPU: a capture that fails names what failed, and leaves the stream usable."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from gpu.capture_setup import captured, compiled, make_model, make_step, run
from piecework.capture_options import CaptureOptions
from piecework.errors import CaptureError
from piecework.runtime.permission import no_capture
from piecework.seam.cuda import CudaDevice, collector_off
from piecework.stages.capture import capture, model_source
from piecework.values.declaration import split_op

pytestmark = pytest.mark.gpu

_library = torch.library.Library("capture_errors", "DEF")
_library.define("reads_back(Tensor x) -> Tensor")


@split_op("capture_errors::reads_back", capture="always")  # it lies: it waits for the GPU
def reads_back(x: Tensor) -> Tensor:
    return x * (2.0 if x.abs().max().item() >= 0 else 1.0)


_library.impl("reads_back", reads_back, "CompositeExplicitAutograd")
torch.library.register_fake("capture_errors::reads_back", torch.empty_like, lib=_library)


class Reads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 16, device="cuda"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.capture_errors.reads_back(x @ self.weight).relu()


def plan(**options: object) -> object:
    return CaptureOptions(prefill="none", decode_sizes=(4,), **options).resolve("cuda", "none", 8)  # type: ignore[arg-type]


def test_an_operator_that_waits_for_the_gpu_is_named_and_everything_works_afterwards() -> None:
    model, x = Reads(), torch.randn(4, 16, device="cuda")
    source = model_source(model, (x,), {"x": {0: "tokens"}}, 8)
    device = CudaDevice()
    with pytest.raises(CaptureError) as caught:
        capture(source, plan(decode="full"), device)  # type: ignore[arg-type]
    print(caught.value.message)
    assert "capture of size 4 of decode (`full`) failed at `capture_errors::reads_back`" in caught.value.message
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    torch.manual_seed(3)
    drawn = torch.randn(8, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(8, device="cuda"), drawn)
    torch.testing.assert_close(model(x), (x @ model.weight * 2).relu(), rtol=1e-3, atol=1e-3)
    again = capture(source, plan(decode="breakable"), device)  # type: ignore[arg-type]
    torch.testing.assert_close(again(x), model(x), rtol=1e-3, atol=1e-3)
    toy, step = make_model(), make_step()
    other = captured(toy, step, device=device, decode="full", decode_sizes=(4,))
    assert torch.equal(run(other, step, 4, 1), run(compiled(toy), step, 4, 1))


def test_garbage_is_not_collected_while_recording() -> None:
    with collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="planted"), collector_off():
        raise ValueError("planted")
    assert gc.isenabled()


def test_capture_where_it_is_forbidden_raises() -> None:
    toy, step = make_model(), make_step()
    idle = captured(toy, step, decode="full", decode_sizes=(4,), when="idle")
    with no_capture("serving"), pytest.raises(CaptureError, match="may not be captured now: serving"):
        idle.capture_some(10)
    assert idle.capture_some(10) == (("decode", 4),)


def test_random_numbers_in_a_graph_are_new_at_each_replay() -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    x = torch.zeros(4, 16, device="cuda")
    source = model_source(Noisy(), (x,), {"x": {0: "tokens"}}, 8)
    program = capture(source, plan(decode="full"), CudaDevice())  # type: ignore[arg-type]
    assert not torch.equal(program(x), program(x))
