"""What does a server's climb from eager to compiled cost those who are served meanwhile, and what does it bring?

    .venv/bin/python benchmarks/tiers.py

The real model in float32 on a CPU under a closed load: a fixed number of requests is always under way. Three fresh
processes: an engine that stays eager, one with an empty store that climbs while it serves, one that finds the store
filled. Bars: the first token of a cold store comes within 1.25 times eager's on two cores; 50 requests are answered
before the first swap; the 99th percentile of the step time of the whole climb is at most 3 times eager's median; greedy
tokens are eager's; tokens a second at the end are at least 1.2 of eager's; a warm start serves tier 1 from its first
step.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from measure import REPOSITORY, versions, write_result

sys.path.insert(0, str(REPOSITORY / "scripts"))

HERE = pathlib.Path(__file__).resolve().parent
CONCURRENT, ANSWER, PROMPTS = 8, 12, 24
WARM_UP_STEPS = 20
CAVEATS = (
    "The load is closed: while steps are slow fewer requests come. Prompts are 8 to 31 tokens, answers 12.",
    "Step times are from the end of one step to the end of the next; they hold what the engine does between steps.",
    "On two cores the compile process takes time from the steps. It stands back by its priority, not by reserve.",
)
WORDS = (
    "The history of bread begins with wild grain , a flat stone and a fire . Long before ovens people baked thin cakes "
    "on hot rocks near rivers where barley grew in summer"
).split()


def main() -> None:
    """Run the three processes, compare, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--requests", type=int, default=40, help="requests of the eager run, and after the swap")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--threads", default="", help="OMP_NUM_THREADS of the server; empty leaves it to torch")
    parser.add_argument("--nice", type=int, default=19, help="how far the compile process stands back")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "tiers.json")
    arguments = parser.parse_args()
    if arguments.role:
        print(json.dumps(serve(arguments)))
        return
    with tempfile.TemporaryDirectory(prefix="tiers-") as folder:
        readings = {role: run(role, arguments, folder) for role in ("eager", "cold", "warm")}
    findings = compare(readings)
    write_result(
        arguments.output, question="What a server's climb costs those who are served meanwhile, and what it brings",
        caveats=CAVEATS,
        body={
            "versions": versions("torch", "transformers"),
            "load": {"concurrent": CONCURRENT, "answer_tokens": ANSWER, "prompts": PROMPTS},
            "server": {"threads": arguments.threads, "nice": arguments.nice},
            "findings": findings,
            "readings": {name: {k: v for k, v in one.items() if k != "answers"} for name, one in readings.items()},
        },
    )  # fmt: skip
    print(json.dumps(findings, indent=1))


def run(role: str, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run one role in a fresh process, with caches of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")}
    environment |= {
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(REPOSITORY / "src"),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor-{role}", "SPAWNED_AT": repr(time.monotonic()),
    }  # fmt: skip
    if arguments.threads:
        environment["OMP_NUM_THREADS"] = arguments.threads
    command = [
        sys.executable, str(HERE / "tiers.py"), "--role", role, "--store", f"{folder}/store",
        "--requests", str(arguments.requests), "--compiler", arguments.compiler, "--nice", str(arguments.nice),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def serve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve the load in this process until there is enough to tell."""
    from piecework import CompileOptions, DiskStore
    from piecework.api.serving import open_engine
    from piecework.engine.options import EngineOptions
    from piecework.events import Recorder
    from real_model import real_model

    recorder = Recorder()
    engine = open_engine(
        real_model(), dtype="float32", options=CompileOptions(compiler=arguments.compiler),
        engine=EngineOptions(
            max_num_sequences=CONCURRENT, max_num_batched_tokens=512, num_pages=512,
            enforce_eager=arguments.role == "eager", compile_nice=arguments.nice,
        ),
        store=DiskStore(arguments.store), observer=recorder,
    )  # fmt: skip
    load = Load(engine)
    while not load.has_token:
        load.step()
    first_token_s = time.monotonic() - float(os.environ["SPAWNED_AT"])
    while engine.has_background_work:
        load.step()
    swapped_at, swap_step = len(load.finished), len(load.step_s)
    while len(load.finished) < swapped_at + arguments.requests:
        load.step()
    status = engine.status
    return {
        "first_token_s": round(first_token_s, 3), "finished_before_swap": swapped_at, "failed": load.failed,
        "steps": len(load.step_s), "steps_by_tier": list(status.steps_by_tier), "tier": status.tier,
        "trouble": status.trouble, "all_ms": spread(load.step_s[WARM_UP_STEPS:]),
        "phases_ms": {name: {"steps": len(times), **spread(times)} for name, times in load.phases.items()},
        "climb_ms": spread(load.step_s[WARM_UP_STEPS:swap_step]), "end_ms": spread(load.step_s[swap_step:]),
        "tokens_per_s": round(sum(load.step_tokens[swap_step:]) / sum(load.step_s[swap_step:]), 1),
        "events": [type(event).__name__ for event in recorder.events if type(event).__name__.startswith("Tier")],
        "climb_s": round(sum(load.step_s[:swap_step]), 1), "pages_held": engine.pool.num_held, "answers": load.finished,
    }  # fmt: skip


class Load:
    """Keeps a number of requests under way, and times each step."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.finished: list[tuple[int, list[int], list[float]]] = []
        self.failed = 0
        self.step_s: list[float] = []
        self.step_tokens: list[int] = []
        self.phases: dict[str, list[float]] = {}
        self._open: dict[str, tuple[int, list[int], list[float]]] = {}
        self._count = 0
        self._before = time.perf_counter()

    @property
    def has_token(self) -> bool:
        """Whether anything was answered."""
        return any(self.step_tokens)

    def step(self) -> None:
        """Ask until enough is under way, and run one step."""
        from piecework.engine.sequence import Request, SamplingParameters

        while len(self._open) < CONCURRENT:
            number = self._count % PROMPTS
            text = " ".join(WORDS[(number + at) % len(WORDS)] for at in range(8 + number))
            ids = tuple(self.engine.served.tokenizer.encode(text).ids)
            parameters = SamplingParameters(max_tokens=ANSWER, ignore_eos=True, logprobs=2)
            self.engine.submit(Request(str(self._count), ids, parameters))
            self._open[str(self._count)] = (number, [], [])
            self._count += 1
        outputs = self.engine.step()
        now = time.perf_counter()
        self.step_s.append(now - self._before)
        self.phases.setdefault(self.engine.tiers.progress.phase, []).append(now - self._before)
        self._before = now
        self.step_tokens.append(len(outputs))
        for output in outputs:
            number, tokens, margins = self._open[output.request_id]
            tokens += output.token_ids
            margins += [one.top[0][1] - one.top[1][1] for one in output.logprobs]
            if output.finish_reason is not None:
                self.failed += output.finish_reason != "length"
                self.finished.append(self._open.pop(output.request_id))


def spread(seconds: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum in milliseconds."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    found = {"median": statistics.median(ordered), "p99": ordered[at], "max": ordered[-1]}
    return {name: round(value * 1e3, 1) for name, value in found.items()}


def compare(readings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Hold the climb and the warm start to the eager run."""
    eager, cold, warm = readings["eager"], readings["cold"], readings["warm"]
    right = {number: (tokens, margins) for number, tokens, margins in eager["answers"]}
    differing, least = 0, float("inf")
    for reading in (cold, warm):
        for number, tokens, _ in reading["answers"]:
            expected, margins = right[number]
            if tokens != expected:
                differing += 1
                first = next(at for at in range(ANSWER) if tokens[at] != expected[at])
                least = min(least, margins[first])
    return {
        "first_token_ratio": round(cold["first_token_s"] / eager["first_token_s"], 3),
        "warm_first_token_ratio": round(warm["first_token_s"] / eager["first_token_s"], 3),
        "requests_before_swap": cold["finished_before_swap"],
        "p99_step_over_eager_median": round(cold["all_ms"]["p99"] / eager["all_ms"]["median"], 2),
        "climb_p99_over_eager_median": round(cold["climb_ms"]["p99"] / eager["all_ms"]["median"], 2),
        "eager_p99_over_its_median": round(eager["all_ms"]["p99"] / eager["all_ms"]["median"], 2),
        "tokens_per_s_ratio": round(cold["tokens_per_s"] / eager["tokens_per_s"], 3),
        "warm_tokens_per_s_ratio": round(warm["tokens_per_s"] / eager["tokens_per_s"], 3),
        "answers_compared": len(cold["answers"]) + len(warm["answers"]),
        "answers_differing": differing,
        "least_margin_where_they_differ": None if differing == 0 else least,
        "failed": eager["failed"] + cold["failed"] + warm["failed"],
        "warm_steps_by_tier": warm["steps_by_tier"],
        "cold_tier": cold["tier"],
        "cold_trouble": cold["trouble"],
    }


if __name__ == "__main__":
    main()
