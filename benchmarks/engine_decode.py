"""What does an engine add to the program that it serves, and how far is decode from what memory allows?

    PYTHONPATH=src:. HF_HUB_OFFLINE=1 python -m benchmarks.engine_decode --scratch /dev/shm --out FILE
    PYTHONPATH=src:. python -m benchmarks.engine_decode --tiny --device cpu --out FILE  # a small shape, to try it

The first is for one GPU: Llama-3-8B's shape, random weights, bfloat16.

It needs torch, transformers, safetensors and tokenizers, 20 GB under `--scratch`, and no network; on an H200 about
three minutes, most of them before the first request. The engine is opened on an empty store and climbs to its best
tier. Then requests of 1,000 tokens are answered together, 1, 8 and 64 at a time, first with steps that run ahead of
their tokens, then with steps that wait for them; a decode step's median is set beside the best tier's own step called
alone on the same batch, and beside the bytes of weights, keys and values over the copy bandwidth of this run. Bar: at 1
and at 64 the engine's step is at most 1.05 of the program alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import torch
from benchmarks.gpu_clock import device_ms
from benchmarks.measure import write_result

import piecework as pw
from piecework.api.serving import open_engine
from piecework.engine.batch import Batch
from piecework.engine.loop import Engine
from piecework.engine.memory import page_bytes
from piecework.engine.options import EngineOptions
from piecework.engine.sequence import Request, SamplingParameters
from piecework.engine.served import call_step
from piecework.engine.tiers import CAPTURED, COMPILED
from piecework.events import FallBack, Recorder

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
CAVEATS = (
    "Random weights: times hold for the shape, numbers mean nothing.",
    "`alone_ms` is the program called again and again, as the device takes it; `alone_once_ms` waits between calls, and"
    " holds what the host takes to launch it.",
    "`plan_ms` and `launch_ms` are the host's: what it does before it calls the program, and until that call returns.",
    "One process on one machine; medians over the decode steps of one set of requests.",
)
BATCHES, PROMPT, ANSWER = (1, 8, 64), 1000, 64
WARM_UP_STEPS = 8
MOST_TOKENS = 256  # of a step: fewer sizes to capture, and decode steps are what is asked for


def make_folder(place: pathlib.Path, shape: dict[str, int], device: str) -> pathlib.Path:
    """Write a random model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", max_position_embeddings=4096, **shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(place)
    return place


def requests(count: int, vocabulary: int, length: int, answer: int) -> list[Request]:
    """Make greedy requests of random tokens."""
    drawn = torch.Generator().manual_seed(count)
    parameters = SamplingParameters(max_tokens=answer, ignore_eos=True)
    prompts = [torch.randint(5, vocabulary, (length,), generator=drawn).tolist() for _ in range(count)]
    return [Request(f"{count}-{index}", tuple(prompt), parameters) for index, prompt in enumerate(prompts)]


class Watching:
    """Keeps the last decode batch, so that its step can be called again alone, and times the host around it."""

    def __init__(self, engine: Engine) -> None:
        self.batch: Batch | None = None
        self.began_s = 0.0
        self.planned_s: list[float] = []
        self.launched_s: list[float] = []
        self._tiers = engine.tiers

    def run(self, batch: Batch) -> torch.Tensor:
        start = time.perf_counter()
        logits = self._tiers.run(batch)
        self.batch = batch
        if batch.is_decode:
            self.planned_s.append(start - self.began_s)
            self.launched_s.append(time.perf_counter() - start)
        return logits


def decode(
    engine: Engine, count: int, length: int, answer: int = ANSWER
) -> tuple[dict[str, float], Batch | None, dict[str, list[int]]]:
    """Answer `count` requests together; return times of a decode step, the last of them, and the answers."""
    watching = Watching(engine)
    engine.runner = watching
    for request in requests(count, engine.served.vocabulary_size, length, answer):
        engine.submit(request)
    times: list[float] = []
    last, answers = None, {}
    while engine.has_work:
        watching.batch, watching.began_s = None, time.perf_counter()
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        batch = watching.batch
        if batch is not None and batch.is_decode and len(batch.scheduled) == count:
            times.append(time.perf_counter() - watching.began_s)
            last = batch
    found = {"engine_ms": times[WARM_UP_STEPS:], "plan_ms": watching.planned_s, "launch_ms": watching.launched_s}
    middle = {name: round(statistics.median(values) * 1e3, 4) for name, values in found.items() if values}
    return middle, last, answers


def ask(engine: Engine, count: int, length: int, bandwidth: float) -> dict[str, Any]:
    """Answer `count` requests with steps that run ahead and with steps that wait, beside the program alone."""
    engine.is_ahead = True
    decode(engine, count, length, 1)  # so that all prompts lie in pages, and all answers begin together
    ahead, last, answers = decode(engine, count, length)
    step = engine.tiers.steps[engine.tiers.best]
    assert step is not None and last is not None
    alone = alone_ms(lambda: call_step(step, last), engine.served.device)
    engine.is_ahead = False
    waiting, _, same = decode(engine, count, length)
    kept = count * (length + ANSWER) * page_bytes(engine.served, 1)
    floor_ms = (engine.served.weights_bytes + kept) / bandwidth * 1e3 if bandwidth else 0.0
    return {
        "batch": count, "tier": engine.tiers.best, **ahead, **alone,
        "engine over alone": round(ahead["engine_ms"] / alone["alone_ms"], 4),
        "waiting": waiting, "waiting over alone": round(waiting["engine_ms"] / alone["alone_ms"], 4),
        "answers that differ": sum(same[name] != tokens for name, tokens in answers.items()),
        "floor_ms": round(floor_ms, 4), "decode_tokens_per_s": round(count / ahead["engine_ms"] * 1e3, 1),
    }  # fmt: skip


def alone_ms(call: Any, device: str, repeats: int = 40) -> dict[str, float]:
    """Return the time of a call among many in a row, and of one that is waited for."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return {"alone_ms": round((time.perf_counter() - start) / repeats * 1e3, 4)}
    once = device_ms(call)

    def many() -> None:
        for _ in range(repeats):
            call()

    return {"alone_ms": round(device_ms(many, 5) / repeats, 4), "alone_once_ms": once}


def copy_bandwidth(device: str) -> float:
    """Return the bytes a second that a large copy reads and writes."""
    if device != "cuda":
        return 0.0
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (device_ms(lambda: target.copy_(source)) / 1e3)


def main() -> None:
    """Open the engine, climb, ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/engine_decode.json"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scratch", default=None, help="where the model and the store are written: 20 GB")
    chosen = parser.parse_args()
    readings: dict[str, Any] = {"copy_bandwidth_gb_s": round(copy_bandwidth(chosen.device) / 1e9, 1), "steps": []}
    length = 40 if chosen.tiny else PROMPT
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as scratch:
        folder = make_folder(pathlib.Path(scratch) / "model", TINY if chosen.tiny else LLAMA_8B, chosen.device)
        watch, started = Recorder(), time.perf_counter()
        options = EngineOptions(
            max_num_sequences=64, max_num_batched_tokens=MOST_TOKENS, max_length=2048,
            memory_fraction=0.0 if chosen.tiny else 0.8,
        )  # fmt: skip
        store = pw.DiskStore(pathlib.Path(scratch) / "store")
        engine = open_engine(
            folder, device=chosen.device, dtype="bfloat16", store=store, engine=options, observer=watch
        )
        readings["open_s"] = round(time.perf_counter() - started, 2)
        engine.wait_for(CAPTURED if chosen.device == "cuda" else COMPILED)
        readings["top_tier_s"] = round(time.perf_counter() - started, 2)
        readings["fall_backs"] = [event.reason for event in watch.of(FallBack)]
        for count in BATCHES:
            readings["steps"].append(ask(engine, count, length, readings["copy_bandwidth_gb_s"] * 1e9))
            print(json.dumps(readings["steps"][-1]), flush=True)
        engine.close()
    print(json.dumps({name: value for name, value in readings.items() if name != "steps"}))
    write_result(chosen.out, question=__doc__.splitlines()[0], caveats=CAVEATS, body={"readings": readings})


if __name__ == "__main__":
    main()
