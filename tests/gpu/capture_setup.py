"""What the tests on a GPU share: a small Llama-shaped model, its programs, and capture of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from benchmarks.llama_shape import DYNAMIC, TINY, Llama, Metadata, inputs, llama, metadata

from piecework.api.programs import compile as compile_program
from piecework.capture_options import CaptureOptions
from piecework.events import Observer, ignore
from piecework.options import CompileOptions
from piecework.runtime.program import Program
from piecework.runtime.replay import CapturedProgram
from piecework.seam.cuda import CudaDevice
from piecework.stages.capture import capture, model_source, program_source
from piecework.store.memory import MemoryStore

LENGTH, MOST = 64, 64
SIZES = (1, 2, 4, 8, 16, 32, 64)
STORE = MemoryStore()


def make_model(*, is_fresh: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Llama:
    """Make the small model."""
    return llama(TINY, dtype, seed=seed, attention="fresh" if is_fresh else "filled")


def make_step(dtype: torch.dtype = torch.bfloat16, sequences: int = MOST) -> Metadata:
    """Make metadata and caches."""
    return Metadata.allocate(TINY, sequences, LENGTH, dtype, is_masked=True)


def compiled(model: Llama, compiler: str = "inductor", **options: Any) -> Program:
    """Compile for all sizes up to the most; pieces of models that are alike are compiled once in the process."""
    settings = {"compiler": compiler, "max_num_batched_tokens": MOST, "ranges": ((1, MOST),), **options}
    example = inputs(TINY, 4, 0)
    with metadata(make_step(model.head.weight.dtype)):
        return compile_program(model, example, dynamic=DYNAMIC, options=CompileOptions(**settings), store=STORE)


def captured(
    model: Llama,
    step: Metadata,
    *,
    mode: str = "piecewise",
    program: Program | None = None,
    device: CudaDevice | None = None,
    observer: Observer = ignore,
    owners: Mapping[str, Any] | None = None,
    **options: Any,
) -> CapturedProgram:
    """Capture decode of a program, or in mode `none` of the model itself."""
    arguments = {name: options.pop(name) for name in ("phase_of", "fixed") if name in options}
    options = {"decode_sizes": SIZES, "prefill": "none", **options}
    plan = CaptureOptions(**options).resolve("cuda", mode, MOST)
    if mode == "none":
        source = model_source(model, inputs(TINY, 4, 0), DYNAMIC, MOST)
    else:
        source = program_source(program or compiled(model))
    roots = owners if owners is not None else {"": model, "step": step}
    steps: Callable[[str, int], contextlib.AbstractContextManager[None]] = lambda phase, size: metadata(step)  # noqa: E731
    return capture(source, plan, device or CudaDevice(), owners=roots, steps=steps, observer=observer, **arguments)


def run(program: Callable[..., Any], step: Metadata, count: int, seed: int = 0) -> torch.Tensor:
    """Run one step of `count` sequences of different lengths; a step run twice writes the same keys twice."""
    step.set(lengths_of(count, seed))
    with metadata(step), torch.no_grad():
        result: torch.Tensor = program(*inputs_of(count, seed))
    return result


def lengths_of(count: int, seed: int) -> list[int]:
    """Return the lengths of a step's sequences."""
    return [2 + (7 * (n + seed)) % (LENGTH - 2) for n in range(count)]


def inputs_of(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and positions of a step."""
    ids, _ = inputs(TINY, count, 0, seed)
    return ids, torch.tensor(lengths_of(count, seed), device="cuda") - 1


@functools.cache
def churn_sizes() -> tuple[int, ...]:
    """Return sizes of allocations, the same in every run."""
    return tuple(int(n) for n in torch.randint(1, 1 << 20, (40,), generator=torch.Generator().manual_seed(3)))


def churn() -> None:
    """Allocate and free memory of many sizes, filled with NaN: what was freed too early is overwritten."""
    kept = [torch.full((size,), float("nan"), device="cuda") for size in churn_sizes()]
    del kept
