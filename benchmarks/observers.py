"""What do observers cost a step: the events of a replay, with counters and the timeline listening, beside none.

    .venv/bin/python benchmarks/observers.py

Blocks with and without observers take turns in one process, over the same captured program on the dry device, whose
replay is the host's work alone. What they add is set against a decode step of the real small model, measured in the
same process.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from measure import REPOSITORY, write_result, yardstick_ms

sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "scripts")]

import piecework as pw  # noqa: E402
from capture_toys import captured, inputs, toy  # noqa: E402
from piecework.diagnostics.counters import Counters  # noqa: E402
from piecework.diagnostics.timeline import Timeline  # noqa: E402
from piecework.events import fan_out, ignore  # noqa: E402
from real_model import real_model  # noqa: E402

CAVEATS = (
    "On a CPU. A replay on the dry device is host work alone: what observers add to it is what they add on a GPU, but "
    "the step it is set against is a CPU's; on a GPU a step of this model is shorter, and the share larger.",
    "A timeline keeps every event: memory grows with the steps. A server counts, and keeps none.",
    "A program without captured sizes emits nothing in a step; `generate` then tells of each token.",
)


def main() -> None:
    """Take the readings, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--calls", type=int, default=50)
    output = REPOSITORY / "benchmarks" / "results" / "observers_cpu.json"
    parser.add_argument("--output", type=pathlib.Path, default=output)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, step = toy(), inputs(4)
    heard = fan_out(Counters(), Timeline())
    sides = {
        name: captured(model, decode="full", decode_sizes=(4,), observer=observer)
        for name, observer in (("without", ignore), ("with", heard))
    }
    means: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(given.blocks + 5):  # the first five are thrown away
        for name in sorted(sides, reverse=bool(block % 2)):
            mean_us = timed(lambda name=name: sides[name](*step), given.calls)  # type: ignore[misc]
            if block >= 5:
                means[name].append(mean_us)
    added_us = statistics.median(means["with"]) - statistics.median(means["without"])
    decode_us = decode_step_us()
    share = added_us / decode_us
    body = {
        "replay_us": {name: round(statistics.median(values), 3) for name, values in means.items()},
        "added_us": round(added_us, 3),
        "decode_step_us": round(decode_us, 1),
        "share_of_a_decode_step": round(share, 6),
        "share_of_a_dry_replay": round(added_us / statistics.median(means["without"]), 4),
        "bar": 0.01,
        "blocks": given.blocks,
        "calls_a_block": given.calls,
        "thrown_away": 5,
        "yardstick_ms": yardstick_ms(),
    }
    write_result(given.output, question="What observers cost a step", caveats=CAVEATS, body=body)
    print(f"{added_us:.2f} us added to a step of {decode_us:.0f} us: {100 * share:.4f} %")


def timed(call: Callable[[], object], count: int) -> float:
    """Return the mean of `count` calls in microseconds."""
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e6


def decode_step_us() -> float:
    """Return the median decode step of the real small model, without compiling it."""
    with tempfile.TemporaryDirectory() as folder:
        options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)
        llm = pw.LLM(real_model(), options=options, store=pw.DiskStore(folder), observer=ignore)
        (answer,) = llm.generate([[1, 2, 3]], max_tokens=12, ignore_eos=True)
    return statistics.median(token.elapsed_s for token in answer.generation.tokens[2:]) * 1e6


if __name__ == "__main__":
    main()
