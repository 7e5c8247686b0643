"""One reading of `piecework bench`, in a process of its own: run as a file, so that it can measure another commit.

It is given one JSON object and prints one line, `READING {…}`. Whoever starts it puts the source to measure first on
the path; only what every commit has is used.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import piecework as pw
from piecework.engine.generate import allocate_caches, run_step
from piecework.events import Phase

MARK = "READING "
_BLOCK_S = 0.02


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Open the model and take the reading."""
    seconds: dict[str, float] = {}

    def observe(event: Any) -> None:
        if isinstance(event, Phase):
            seconds[event.name] = seconds.get(event.name, 0.0) + event.elapsed_s

    options = pw.CompileOptions(**{name: _tuples(value) for name, value in given["options"].items()})
    llm = pw.LLM(
        given["model"], dtype=given["dtype"], device=given["device"], options=options,
        store=pw.DiskStore(given["store"]), observer=observe, offline=True,
    )  # fmt: skip
    opened_s = time.monotonic() - given["spawned_at"]
    found = {"startup": _startup, "dispatch": _dispatch, "decode": _decode}[given["what"]](llm, given)
    phases = {f"{name}_s": round(value, 4) for name, value in seconds.items() if name not in ("prefill", "decode")}
    return {**found, "opened_s": round(opened_s, 4), "phases": phases}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _startup(llm: Any, given: dict[str, Any]) -> dict[str, Any]:
    llm.generate([given["prompt_ids"]], max_tokens=1, ignore_eos=True)
    return {"value": round(time.monotonic() - given["spawned_at"], 4)}


def _decode(llm: Any, given: dict[str, Any]) -> dict[str, Any]:
    rates = []
    for turn in range(given["warmups"] + given["calls"]):
        (answer,) = llm.generate([given["prompt_ids"]], max_tokens=given["tokens"], ignore_eos=True)
        if turn >= given["warmups"]:
            rates.append(round(answer.generation.tokens_per_s, 3))
    return {"value": statistics.median(rates), "rates": rates}


def _dispatch(llm: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Time steps of one token, the same one again and again: what the host does, and on a CPU the kernels with it."""
    model = llm.model
    caches = allocate_caches(model.sites, num_pages=1, page_size=64, dtype=model.dtype, device=model.device)
    run_step(model.step, given["prompt_ids"], 0, caches, model.device)
    place = len(given["prompt_ids"])

    def call() -> None:
        run_step(model.step, [1], place, caches, model.device)

    for _ in range(given["warmups"]):
        call()
    means = []
    for _ in range(given["calls"]):
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < _BLOCK_S:
            call()
            count += 1
        means.append(round((time.perf_counter() - start) / count * 1e6, 2))
    return {"value": statistics.median(means), "least_us": min(means)}


if __name__ == "__main__":
    sys.stdout.write(f"{MARK}{json.dumps(main(json.loads(sys.argv[1])))}\n")
