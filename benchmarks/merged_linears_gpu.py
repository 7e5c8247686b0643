"""Is a captured step of Llama-3-8B's shape faster with its parallel linears merged, and does it take more memory?

    python -m benchmarks.merged_linears_gpu [--tiny] [--out FILE]

One process: a model whose q/k/v and gate/up stand apart, in bf16 with random weights, is compiled without and with
`merge_linears`. Both are captured whole for 1, 8 and 64 sequences of 1,024 tokens, and their steps are timed by turns.
The bars: at one sequence a merged step takes at most 0.98 of the other's, and its peak memory is not higher. Where
there is no GPU nothing is captured, and the figures mean nothing: `--tiny` tries the script there.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_clock import device_ms
from benchmarks.llama_shape import DEVICE, DYNAMIC, LLAMA_8B, TINY, Llama, Metadata, Shape, inputs, llama, metadata
from benchmarks.measure import write_result

from piecework.api.programs import compile as compile_program
from piecework.capture_options import CaptureOptions
from piecework.events import FallBack, PassDone, Recorder
from piecework.options import CompileOptions
from piecework.runtime.program import Program
from piecework.seam.cuda import CudaDevice
from piecework.stages.capture import capture, program_source
from piecework.store.disk import DiskStore

SIDES = {"plain": ("no_ops",), "merged": ("no_ops", "merge_linears")}
SIZES = (1, 8, 64)
LENGTH, BAR = 1024, 0.98
CAVEATS = (
    "Random weights: times hold for the shape, numbers mean nothing.",
    "Attention is torch's scaled_dot_product_attention over contiguous pages; merging does not touch it.",
    "A step's time is the median of rounds, sides by turns; a round's is the median of its steps by the device.",
    "Weights that lie on the device before they are bound are joined there, one set at a time: while it binds, the "
    "merged side holds one set twice. From files they are read into place.",
)
HAS_GPU = DEVICE == "cuda"


def allocated() -> int:
    """Return the bytes that tensors hold on the device now."""
    return torch.cuda.memory_allocated() if HAS_GPU else 0


def peak_since(reset: bool = False) -> int:
    """Return the most bytes held since the last reset."""
    if not HAS_GPU:
        return 0
    most = torch.cuda.max_memory_allocated()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return most


def bound(side: str, shape: Shape, step: Metadata, folder: str) -> tuple[Llama, Program, dict[str, Any]]:
    """Make a model, compile it into a store, drop it, and bind another one from the store; say what that took."""
    options = CompileOptions(
        passes=SIDES[side], max_num_batched_tokens=max(SIZES), ranges=((1, max(SIZES)),), verify=False
    )
    watch, start = Recorder(), time.perf_counter()

    def once() -> tuple[Llama, Program]:
        model = llama(shape, is_apart=True)
        gc.collect()
        peak_since(reset=True)
        with metadata(step):
            program = compile_program(
                model, inputs(shape, 4, 0), dynamic=DYNAMIC, options=options, store=DiskStore(folder), observer=watch
            )
        return model, program

    once()  # compiles; what follows finds all of it
    gc.collect()
    before = allocated()
    model, program = once()
    (report,) = [done for done in watch.of(PassDone) if done.name == "merge_linears"][:1] or [None]
    facts = {
        "matches": report.matches if report is not None else 0,
        "fall_backs": [fallen.reason for fallen in watch.of(FallBack)],
        "start_s": round(time.perf_counter() - start, 2),
        "peak_while_binding": peak_since() - before,
        "held_bytes": allocated() - before,
    }
    return model, program, facts


def runner(model: Llama, program: Program, step: Metadata) -> Callable[..., Any]:
    """Return what runs a step: the captured program where there is a GPU."""
    if not HAS_GPU:
        return program
    plan = CaptureOptions(prefill="none", decode="full", decode_sizes=SIZES).resolve("cuda", "piecewise", max(SIZES))
    return capture(
        program_source(program), plan, CudaDevice(), owners={"": model, "step": step},
        steps=lambda phase, size: metadata(step), phase_of=lambda: "decode", observer=Recorder(),
    )  # fmt: skip


def clocked(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call in milliseconds."""
    if HAS_GPU:
        return device_ms(call, repeats)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def times_of(runners: dict[str, Callable[..., Any]], shape: Shape, step: Metadata, rounds: int) -> dict[str, Any]:
    """Time both sides by turns at each size, and compare what they give."""
    found: dict[str, Any] = {}
    with metadata(step), torch.no_grad():
        for size in SIZES:
            given = inputs(shape, size, LENGTH - 1)
            results = {side: run(*given).float().clone() for side, run in runners.items()}
            readings: dict[str, list[float]] = {side: [] for side in runners}
            for turn in range(rounds):
                for side in sorted(runners, reverse=turn % 2 == 1):
                    readings[side].append(clocked(partial(runners[side], *given), 12))
            medians = {side: statistics.median(each) for side, each in readings.items()}
            difference = float((results["merged"] - results["plain"]).norm() / results["plain"].norm())
            found[f"{size}"] = {
                "ms": medians, "ratio": round(medians["merged"] / medians["plain"], 4), "readings": readings,
                "relative_difference": difference,
            }  # fmt: skip
            print(json.dumps({"size": size, **found[f"{size}"]}), flush=True)
    return found


def main() -> None:
    """Build both, time them by turns, judge the bars, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/merged_linears_gpu.json"))
    chosen = parser.parse_args()
    shape = TINY if chosen.tiny else LLAMA_8B
    device = torch.cuda.get_device_name() if HAS_GPU else "no GPU"
    print(json.dumps({"device": device, "torch": torch.__version__, "python": sys.version.split()[0]}), flush=True)
    step = Metadata.allocate(shape, max(SIZES), LENGTH, torch.bfloat16, is_masked=False)
    facts: dict[str, Any] = {}
    runners, kept = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            model, program, facts[side] = bound(side, shape, step, folder)
            before = allocated()
            peak_since(reset=True)
            runners[side] = runner(model, program, step)
            with metadata(step), torch.no_grad():
                runners[side](*inputs(shape, max(SIZES), LENGTH - 1))
            facts[side]["peak_of_capture_and_step"] = peak_since() - before
            facts[side]["peak"] = facts[side]["held_bytes"] + facts[side]["peak_of_capture_and_step"]
            kept += [model, program]
            print(json.dumps({"side": side, **facts[side]}), flush=True)
        times = times_of(runners, shape, step, chosen.rounds)
    bars = {
        f"merged <= {BAR} of plain at 1": times["1"]["ratio"] <= BAR,
        "peak is not higher": facts["merged"]["peak"] <= facts["plain"]["peak"],
        "no weight is held twice": facts["merged"]["held_bytes"] <= facts["plain"]["held_bytes"],
        "all parallel linears are merged": facts["merged"]["matches"] == 2 * shape.layers,
    }
    print(json.dumps({"bars": bars}, indent=2))
    body = {"device": device, "facts": facts, "steps": times, "bars": bars}
    write_result(chosen.out, question=__doc__.splitlines()[0], caveats=CAVEATS, body=body)


if __name__ == "__main__":
    main()
