"""What does the audit of a Llama of 32 layers cost: its guards read, proven and kept, without the trace itself?

    .venv/bin/python benchmarks/audit.py

The bar: at most 0.5 s of processor time on a machine where the yardstick takes 1.2 ms, and in proportion elsewhere.

The toy Llama is traced once, under a profile: what reading the conditions on sizes takes in it, which the profile makes
look longer, is `read`. Then the audit's other steps are timed again and again on that trace: attributes compared before
and after, each condition proven over 1 to 8,192 tokens, code and Python values collected as evidence, and
that evidence held against the model, as `program.check()` and a start with a model object do.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pathlib
import time
from collections.abc import Callable

import torch

from measure import machine, write_result, yardstick_ms
from piecework.stages.audit import prove
from piecework.stages.evidence import changed_fact, collect
from piecework.stages.trace import trace
from piecework.values.attributes import read_attributes, refuse_writes
from piecework.values.graph import TracedGraph
from piecework.values.shapes import Range
from toy_llama import ToyLlama, ToyShape

HERE = pathlib.Path(__file__).resolve().parent
BAR_S, YARDSTICK_MS = 0.5, 1.2
CAVEATS = (
    "Processor seconds of one thread, the least of several repetitions: noise only ever adds.",
    "A condition on two sizes that no interval shows is tried at up to four million pairs; the toy has none.",
)


def least_s(step: Callable[[], object], repetitions: int) -> float:
    """Return the least processor seconds of a step."""
    taken = []
    for _ in range(repetitions):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    """Trace once, time each step of the audit, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "audit.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = ToyShape(layers=arguments.layers)
    model = ToyLlama(shape).eval()
    tokens = 5
    example = (torch.arange(tokens), torch.arange(tokens))
    dynamic = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
    bounds = {"tokens": Range(1, shape.max_positions)}
    profile = cProfile.Profile(time.process_time)
    traced = profile.runcall(trace, model, example, dynamic, bounds=bounds)
    steps = {"read": _seconds_in(profile, "read_shape_guards")}
    steps |= {name: least_s(step, arguments.repetitions) for name, step in _steps(model, traced, bounds).items()}
    yardstick = yardstick_ms()
    total = sum(steps.values())
    body = {
        "layers": arguments.layers,
        "guards": len(traced.guards),
        "shape_guards": len(traced.shape_guards),
        "steps_s": {name: round(value, 4) for name, value in steps.items()},
        "audit_s": round(total, 4),
        "yardstick_ms": yardstick,
        "bar_s": round(BAR_S * yardstick / YARDSTICK_MS, 3),
        "holds": total <= BAR_S * yardstick / YARDSTICK_MS,
    }
    write_result(arguments.output, question=(__doc__ or "").splitlines()[0], caveats=CAVEATS, body=body)
    print(json.dumps(body, indent=1))
    print(f"machine: {json.dumps(machine())}")


def _seconds_in(profile: cProfile.Profile, function: str) -> float:
    profile.create_stats()
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = profile.stats  # type: ignore[attr-defined]
    return sum(entry[3] for (_, _, name), entry in stats.items() if name == function)


def _steps(model: torch.nn.Module, traced: TracedGraph, bounds: dict[str, Range]) -> dict[str, Callable[[], object]]:
    before = read_attributes(model)
    evidence, _ = collect(traced.guards, traced.code, traced.constants)
    assert changed_fact(evidence.facts, model) == ""
    return {
        "attributes": lambda: (read_attributes(model), refuse_writes(model, before)),
        "prove": lambda: [prove(guard, bounds, traced.sizes) for guard in traced.shape_guards],
        "collect": lambda: collect(traced.guards, traced.code, traced.constants),
        "compare": lambda: changed_fact(evidence.facts, model),
    }


if __name__ == "__main__":
    main()
