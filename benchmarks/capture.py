"""How long do capture and replay take on a GPU, and what do they hold, on a model of Llama-3-8B's shape?

Prints a JSON line for each question as it is answered, and writes the whole to the file that `--out` names. Weights are
random, bf16; each sequence holds 1,024 tokens; attention is torch's own over contiguous pages. One process, one run:
ratios are taken inside it. `--tiny` runs the same on a small shape, to try the script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu_clock import device_ms, host_us
from benchmarks.llama_shape import DYNAMIC, LLAMA_8B, TINY, Llama, Metadata, Shape, inputs, llama, metadata
from benchmarks.measure import write_result

from piecework.api.programs import compile as compile_program
from piecework.capture_events import Captured
from piecework.capture_options import CaptureOptions
from piecework.events import ArtifactCompiled, FallBack, Phase, Recorder
from piecework.options import CompileOptions
from piecework.runtime.program import Program
from piecework.runtime.replay import CapturedProgram
from piecework.seam.cuda import CudaDevice
from piecework.stages.capture import capture, program_source
from piecework.store.disk import DiskStore

LENGTH, LARGEST, MOST = 1024, 512, 256  # tokens a sequence, largest size, most sequences of that length
CAVEATS = (
    "Random weights: times hold for the shape, numbers mean nothing.",
    "Attention is torch's scaled_dot_product_attention over contiguous pages: an engine's own kernel is faster.",
    "Medians of device events or of the host's clock, each in one process on one machine.",
)
READINGS: dict[str, Any] = {}


def say(name: str, **reading: Any) -> None:
    """Print a reading and keep it."""
    READINGS.setdefault(name, []).append(reading)
    print(json.dumps({"question": name, **reading}), flush=True)


@contextlib.contextmanager
def asking(name: str) -> Iterator[None]:
    """Answer a question; a failure is printed and the next question is asked all the same."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the other questions are still worth their answers
        traceback.print_exc()
        say(name, error=f"{type(error).__name__}: {error}")
    say("seconds", of=name, s=round(time.perf_counter() - start, 2))


def compiled(model: Llama, shape: Shape, step: Metadata, folder: str, watch: Recorder) -> Program:
    """Compile the model into a store."""
    options = CompileOptions(max_num_batched_tokens=LARGEST, ranges=((1, LARGEST),))
    with metadata(step):
        return compile_program(
            model, inputs(shape, 4, 0), dynamic=DYNAMIC, options=options, store=DiskStore(folder), observer=watch
        )


def captured(
    program: Program, model: Llama, step: Metadata, device: CudaDevice, watch: Recorder, **options: Any
) -> CapturedProgram:
    """Capture a program under one step's metadata."""
    settings = {"prefill": "none", **options}
    plan = CaptureOptions(**settings).resolve("cuda", "piecewise", LARGEST)
    return capture(
        program_source(program), plan, device, owners={"": model, "step": step},
        steps=lambda phase, size: metadata(step), phase_of=lambda: PHASE[0], observer=watch,
    )  # fmt: skip


PHASE = ["decode"]


def ask_compile(model: Llama, shape: Shape, step: Metadata, folder: str) -> Program:
    """Cold start: trace, cut, compile."""
    watch = Recorder()
    start = time.perf_counter()
    program = compiled(model, shape, step, folder, watch)
    say(
        "cold start", s=round(time.perf_counter() - start, 2), key=program.key,
        phases={e.name: round(e.elapsed_s, 3) for e in watch.of(Phase)},
        artifacts=[(e.piece[:8], e.range, e.size_bytes, round(e.elapsed_s, 2)) for e in watch.of(ArtifactCompiled)],
        bytes_in_all=sum(e.size_bytes for e in watch.of(ArtifactCompiled)),
        fall_backs=[(e.what, e.reason) for e in watch.of(FallBack)],
    )  # fmt: skip
    return program


def ask_capture(program: Program, model: Llama, step: Metadata) -> dict[str, CapturedProgram]:
    """Time of capture: sizes one by one in each form, and 35 sizes in both."""
    for form in ("piecewise", "full"):
        watch, device = Recorder(), CudaDevice()
        one = captured(program, model, step, device, watch, decode=form, decode_sizes=(1, 8, 64, 256))
        events = watch.of(Captured)
        say(
            "one size", form=form, ms={e.size: round(e.elapsed_s * 1e3, 2) for e in events},
            graphs=events[0].graphs, segments=events[0].segments,
            bytes={e.size: (e.predicted_bytes, e.size_bytes) for e in events},
        )  # fmt: skip
        one.release()
    watch, device = Recorder(), CudaDevice()
    torch.cuda.synchronize()
    start = time.perf_counter()
    both = captured(
        program, model, step, device, watch, decode="full", prefill="piecewise", decode_max=256, prefill_max=256
    )
    torch.cuda.synchronize()
    events = watch.of(Captured)
    say(
        "35 sizes in both forms", s=round(time.perf_counter() - start, 3), captured=len(events),
        median_ms={f: _median_ms(events, f) for f in ("full", "piecewise")},
        pool_bytes=device.pool_bytes(), used_bytes=device.used_bytes(),
    )  # fmt: skip
    return {"both": both}


def _median_ms(events: list[Captured], form: str) -> float:
    return round(statistics.median(e.elapsed_s for e in events if e.form == form) * 1e3, 2)


def ask_replay(both: CapturedProgram, program: Program, shape: Shape, step: Metadata) -> None:
    """Replay against the uncaptured program: bit for bit, random order, churn between; then times."""
    order = [rung.size for rung in both.plan.decode.rungs] * 2
    random.Random(0).shuffle(order)
    unequal = []
    with metadata(step), torch.no_grad():
        for seed, count in enumerate(order):
            PHASE[0] = "decode" if seed % 2 else "prefill"
            given = inputs(shape, count, LENGTH - 1, seed)
            expected = program(*given)
            junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
            del junk
            if not torch.equal(both(*given), expected):
                unequal.append((PHASE[0], count))
        say("replay equals the program", steps=len(order), unequal=unequal)
        for count in (1, 64):
            given = inputs(shape, count, LENGTH - 1)
            reading: dict[str, Any] = {
                "batch": count,
                "program": {
                    "ms": device_ms(lambda g=given: program(*g)),
                    "host_us": host_us(lambda g=given: program(*g)),
                },
            }
            for phase, form in (("decode", "full"), ("prefill", "piecewise")):
                PHASE[0] = phase
                reading[form] = {
                    "ms": device_ms(lambda g=given: both(*g)),
                    "host_us": host_us(lambda g=given: both(*g)),
                }
            both.plan = replace(both.plan, results="borrowed")
            PHASE[0] = "decode"
            reading["full, borrowed"] = {"host_us": host_us(lambda g=given: both(*g))}
            both.plan = replace(both.plan, results="copied")
            graph = both.sizes["decode", count].graphs[0]
            reading["bare graph"] = {"ms": device_ms(graph.replay), "host_us": host_us(graph.replay)}
            reading["piecewise over full"] = round(reading["piecewise"]["ms"] / reading["full"]["ms"], 4)
            say("a step", **reading)
        table = both._parts.table
        start = time.perf_counter()
        for _ in range(1000):
            table.is_moved()
        say("address check", externals=len(table), us=round((time.perf_counter() - start) * 1e3, 2))


def ask_pool(program: Program, model: Llama, shape: Shape) -> None:
    """Bytes of the pool for sizes up to 512, against the largest size's own."""
    held = {}
    step = Metadata.allocate(shape, LARGEST, 64, torch.bfloat16, is_masked=False)
    for name, sizes in (("largest alone", (LARGEST,)), ("all", None)):
        device = CudaDevice()
        options: dict[str, Any] = {"decode_sizes": sizes} if sizes else {"decode_max": LARGEST}
        one = captured(program, model, step, device, Recorder(), decode="piecewise", **options)
        held[name] = device.pool_bytes()
        one.release()
    say("pool", **held, ratio=round(held["all"] / held["largest alone"], 4))


def ask_stock(model: Llama, both: CapturedProgram, shape: Shape, step: Metadata) -> None:
    """Time the same model under torch.compile(mode="reduce-overhead"), in the same run."""
    with metadata(step), torch.no_grad():
        for count in (1, 64):
            given = inputs(shape, count, LENGTH - 1)
            torch._dynamo.reset()
            start = time.perf_counter()
            stock = torch.compile(model, fullgraph=True, mode="reduce-overhead")
            for _ in range(3):
                stock(*given)
            torch.cuda.synchronize()
            first_s = round(time.perf_counter() - start, 2)
            PHASE[0] = "decode"
            ours = device_ms(lambda g=given: both(*g))
            theirs = device_ms(lambda g=given, call=stock: call(*g))
            again = device_ms(lambda g=given: both(*g))
            say(
                "against reduce-overhead",
                batch=count,
                ours_ms=[ours, again],
                stock_ms=theirs,
                first_s=first_s,
                ratio=round(min(ours, again) / theirs, 4),
            )


def ask_warm(program: Program, shape: Shape, folder: str, tiny: bool) -> None:
    """Warm start in a fresh process, PATH and caches empty; its result against the cold process's."""
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory() as scratch:
        result = os.path.join(scratch, "result.pt")
        environment = {
            "WARM_PATH": json.dumps([root, os.path.join(root, "src"), *filter(None, sys.path)]),
            "WARM_TINY": "1" if tiny else "",
            "WARM_STORE": folder, "WARM_KEY": program.key, "WARM_RESULT": result, "PATH": "", "HOME": scratch,
            "TMPDIR": scratch, "TRITON_CACHE_DIR": scratch, "TORCHINDUCTOR_CACHE_DIR": scratch,
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        }  # fmt: skip
        script = pathlib.Path(__file__).with_name("capture_warm.py")
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        line = next((line for line in done.stdout.splitlines() if line.startswith("WARM ")), "")
        if not line:
            say("warm start", error=done.stderr[-3000:])
            return
        torch.manual_seed(0)
        again = llama(shape)  # the random state is where the child's was when it made its caches
        fresh = Metadata.allocate(shape, 4, LENGTH, torch.bfloat16, is_masked=False)
        del again
        with metadata(fresh), torch.no_grad():
            expected = program(*inputs(shape, 4, LENGTH - 1))
        got = torch.load(result)
        say("warm start", **json.loads(line[5:]), is_bit_equal=torch.equal(got, expected.cpu()))


def main() -> None:
    """Ask all questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/capture.json"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", help="comma-separated: capture, replay, pool, stock, warm")
    chosen = parser.parse_args()
    only = set(filter(None, chosen.only.split(","))) or {"capture", "replay", "pool", "stock", "warm"}
    shape = TINY if chosen.tiny else LLAMA_8B
    say("machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__, python=sys.version.split()[0])
    start = time.perf_counter()
    model = llama(shape)
    step = Metadata.allocate(shape, MOST, LENGTH, torch.bfloat16, is_masked=False)
    torch.cuda.synchronize()
    say("weights and caches", s=round(time.perf_counter() - start, 2), gb=round(torch.cuda.memory_allocated() / 1e9, 2))
    with tempfile.TemporaryDirectory() as folder:
        program = None
        with asking("compile"):
            program = ask_compile(model, shape, step, folder)
        if program is None:
            return
        made: dict[str, CapturedProgram] = {}
        if {"capture", "replay", "stock"} & only:
            with asking("capture"):
                made = ask_capture(program, model, step)
        if made and "replay" in only:
            with asking("replay"):
                ask_replay(made["both"], program, shape, step)
        if made and "stock" in only:
            with asking("stock"):
                ask_stock(model, made["both"], shape, step)
        if made:
            made.pop("both").release()
        gc.collect()
        if "pool" in only:
            with asking("pool"):
                ask_pool(program, model, shape)
        if "warm" in only:
            with asking("warm"):
                ask_warm(program, shape, folder, chosen.tiny)
    write_result(chosen.out, question=__doc__.splitlines()[0], caveats=CAVEATS, body={"readings": READINGS})


if __name__ == "__main__":
    main()
