"""A small Llama with the operators in Triton, cut three ways on a GPU: each agrees with eager, captured too."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.toy import ToyLlama, example

import piecework as pw
from piecework.capture_options import CaptureOptions
from piecework.events import FallBack, PassDone, Recorder
from piecework.seam.cuda import CudaDevice
from piecework.stages.capture import capture, program_source

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DYNAMIC = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
SIZES = (1, 2, 7, 32, 64)


@pytest.mark.parametrize("partition", ["fx", "inductor", "none"])
def test_each_partition_agrees_with_eager_and_its_capture_with_it(partition: str) -> None:
    model = ToyLlama(layers=3, hidden=256).cuda().to(torch.bfloat16).eval().requires_grad_(False)
    exact = ToyLlama(layers=3, hidden=256).cuda().eval().requires_grad_(False)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    options = pw.CompileOptions(
        partition=partition, custom_ops=("all",), passes=("no_ops", "merge_linears"), ranges=((1, 64),),
        max_num_batched_tokens=64,
    )  # fmt: skip
    watch = Recorder()
    program = pw.compile(
        model, example(16, "cuda"), dynamic=DYNAMIC, options=options, store=pw.MemoryStore(), observer=watch
    )
    assert [fallen.reason for fallen in watch.of(FallBack)] == []
    assert sum(done.matches for done in watch.of(PassDone) if done.name == "use_operators") > 0
    plan = CaptureOptions(prefill="none", decode="full", decode_sizes=(8, 64)).resolve("cuda", "piecewise", 64)
    captured = capture(
        program_source(program), plan, CudaDevice(), owners={"": model}, phase_of=lambda: "decode", observer=watch
    )
    for size in SIZES:
        given = example(size, "cuda")
        found = program(*given)
        with torch.no_grad():
            want, eager = exact(*given), model(*given).float()
        allowed = max(2 * float((eager - want).norm() / want.norm()), 4 * 2**-8)
        assert float((found.float() - want).norm() / want.norm()) <= allowed, size
        assert float((captured(*given).float() - want).norm() / want.norm()) <= allowed, size
