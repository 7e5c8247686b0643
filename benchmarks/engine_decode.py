"""What does an engine add to the program that it serves, and how far is decode from what memory allows?

    python -m benchmarks.engine_decode --out FILE                    # one GPU, Llama-3-8B's shape, random weights, bf16
    python -m benchmarks.engine_decode --tiny --device cpu --out FILE  # a small shape and short prompts, to try it

The engine is opened on an empty store and climbs to its best tier. Then requests of 1,000 tokens are answered together,
1, 8 and 64 at a time; a decode step's median is set beside the best tier's own step called alone on the same batch, and
beside the bytes of weights, keys and values over the copy bandwidth of this run.
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
    "The engine waits for a step's tokens before it plans the next: what the host does in between is in its step.",
    "One process on one machine; medians over the decode steps of one set of requests.",
)
BATCHES, PROMPT, ANSWER = (1, 8, 64), 1000, 48


def make_folder(place: pathlib.Path, shape: dict[str, int], device: str) -> pathlib.Path:
    """Write a random model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", max_position_embeddings=4096, **shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(place)
    return place


def requests(count: int, vocabulary: int, length: int) -> list[Request]:
    """Make greedy requests of random tokens."""
    drawn = torch.Generator().manual_seed(count)
    parameters = SamplingParameters(max_tokens=ANSWER, ignore_eos=True)
    prompts = [torch.randint(5, vocabulary, (length,), generator=drawn).tolist() for _ in range(count)]
    return [Request(f"{count}-{index}", tuple(prompt), parameters) for index, prompt in enumerate(prompts)]


class Watching:
    """Keeps the last decode batch, so that its step can be called again alone."""

    def __init__(self, engine: Engine) -> None:
        self.batch: Batch | None = None
        self.num_sampled = 0
        self._tiers = engine.tiers

    def run(self, batch: Batch) -> torch.Tensor:
        if batch.is_decode:
            self.batch, self.num_sampled = batch, len(batch.sampled)
        return self._tiers.run(batch)


def ask(engine: Engine, count: int, length: int, bandwidth: float) -> dict[str, Any]:
    """Answer `count` requests together; return times of a decode step."""
    watching = Watching(engine)
    engine.runner = watching
    for request in requests(count, engine.served.vocabulary_size, length):
        engine.submit(request)
    times, tokens, started = [], 0, time.perf_counter()
    while engine.scheduler.has_work:
        watching.batch, before = None, time.perf_counter()
        tokens += sum(len(output.token_ids) for output in engine.step())
        if watching.batch is not None and watching.num_sampled == count:
            times.append(time.perf_counter() - before)
            last = watching.batch
    elapsed_s = time.perf_counter() - started
    step = engine.tiers.steps[engine.tiers.best]
    assert step is not None
    alone_ms = _alone_ms(lambda: call_step(step, last), engine.served.device)
    engine_ms = round(statistics.median(times) * 1e3, 4)
    kept = count * (length + ANSWER) * page_bytes(engine.served, 1)
    floor_ms = (engine.served.weights_bytes + kept) / bandwidth * 1e3 if bandwidth else 0.0
    return {
        "batch": count, "tier": engine.tiers.best, "engine_ms": engine_ms, "alone_ms": alone_ms,
        "engine over alone": round(engine_ms / alone_ms, 4), "floor_ms": round(floor_ms, 4),
        "tokens_per_s": round(tokens / elapsed_s, 1), "decode_tokens_per_s": round(count / engine_ms * 1e3, 1),
    }  # fmt: skip


def _alone_ms(call: Any, device: str) -> float:
    if device == "cuda":
        return device_ms(call)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 4)


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
        options = EngineOptions(max_num_sequences=64, max_length=2048, memory_fraction=0.0 if chosen.tiny else 0.8)
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
