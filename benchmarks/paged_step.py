"""How long does the host take for a step whose attention calls stand between graphs?

    python -m benchmarks.paged_step [--tiny] [--out FILE]

A model of Llama-3-8B's shape with random weights, bf16, 1,024 tokens a sequence, whose 32 layers write keys and attend
over pages by Piecework's own operators, in Triton. It is captured in both forms; results are borrowed. The bars: a
piecewise step takes the host at most 1.6 ms, a full one 80 us. One process, one run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu_clock import device_ms, host_us
from benchmarks.llama_shape import DYNAMIC, LLAMA_8B, TINY, Shape, inputs, llama, paged_caches, paged_step
from benchmarks.measure import write_result

from piecework.api.programs import compile as compile_program
from piecework.capture_options import CaptureOptions
from piecework.ops.step import step_context
from piecework.ops.triton_attention import TritonAttention
from piecework.options import CompileOptions
from piecework.runtime.replay import CapturedProgram
from piecework.seam.cuda import CudaDevice
from piecework.seam.launch import quick_launch
from piecework.stages.capture import capture, program_source
from piecework.store.disk import DiskStore

LENGTH, PAGE, SIZES = 1024, 16, (1, 8)
FORMS = {"full": "decode", "piecewise": "prefill"}
PHASE = ["decode"]


class Question:
    """The model, its program and the captured program, with a step for each size."""

    def __init__(self, shape: Shape, folder: str) -> None:
        self.shape, self.backend = shape, TritonAttention(quick_launch)
        self.sites = paged_caches(shape, max(SIZES) * LENGTH // PAGE, PAGE)
        self.steps = {count: self.step(count) for count in SIZES}
        self.model = llama(shape, attention="paged")
        options = CompileOptions(max_num_batched_tokens=max(SIZES), ranges=((1, max(SIZES)),))
        with step_context(self.steps[1]):
            self.program = compile_program(
                self.model, inputs(shape, 1, 0), dynamic=DYNAMIC, options=options, store=DiskStore(folder)
            )
        self.captured = self._capture()

    def step(self, count: int) -> Any:
        """Make a step's metadata, on the host and on the device."""
        return paged_step(self.sites, count, LENGTH, PAGE, self.backend)

    def _capture(self) -> CapturedProgram:
        sizes = {f"{phase}_sizes": SIZES for phase in FORMS.values()}
        plan = CaptureOptions(results="borrowed", **{phase: form for form, phase in FORMS.items()}, **sizes)
        return capture(
            program_source(self.program), plan.resolve("cuda", "piecewise", max(SIZES)), CudaDevice(),
            owners={"": self.model, "sites": self.sites}, steps=lambda phase, size: self.step(size),
            phase_of=lambda: PHASE[0],
        )  # fmt: skip

    def ask(self, count: int) -> dict[str, Any]:
        """Time one size in both forms."""
        given = inputs(self.shape, count, LENGTH - 1)
        reading: dict[str, Any] = {"batch": count}

        def step() -> Any:
            return self.captured(*given)

        def planned() -> Any:
            with step_context(self.step(count)):
                return self.captured(*given)

        with step_context(self.steps[count]), torch.no_grad():
            expected = self.program(*given)
            for form, phase in FORMS.items():
                PHASE[0] = phase
                is_equal = torch.equal(step().value, expected)
                reading[form] = {"ms": device_ms(step), "host_us": host_us(step), "is_equal": is_equal}
            captured = self.captured.sizes["prefill", count]
            parts: dict[str, Callable[[], Any]] = {
                "piecewise, the step made anew": planned,
                "its segments alone": lambda: [segment() for segment in captured.segments],
                "its graphs alone": lambda: [graph.replay() for graph in captured.graphs],
            }
            reading |= {name: {"host_us": host_us(call)} for name, call in parts.items()}
        return reading


def main() -> None:
    """Ask for each size, and keep the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        question = Question(TINY if chosen.tiny else LLAMA_8B, folder)
        readings = [question.ask(count) for count in SIZES]
    for reading in readings:
        print(json.dumps(reading), flush=True)
    if chosen.out:
        versions = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
        caveats = ("Random weights: times hold for the shape, numbers mean nothing.",)
        first = (__doc__ or "").splitlines()[0]
        write_result(chosen.out, question=first, caveats=caveats, body={"versions": versions, "readings": readings})


if __name__ == "__main__":
    main()
