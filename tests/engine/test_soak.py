"""Streams of random requests, aborts and leavings: outputs as alone, no page lost, memory that does not grow."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest

from engine.counting import request
from piecework.api.serving import open_engine
from piecework.engine.generate import generate
from piecework.engine.options import EngineOptions
from piecework.engine.service import Service
from piecework.models.hugging_face import LoadedModel, load_model
from tiny_models import tiny_folder

PROMPTS = 40
STREAMS = 64
SLACK = 1e-4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def prompt_of(number: int) -> tuple[list[int], int]:
    """Return one of the prompts, and how many tokens are asked for."""
    chance = random.Random(number)
    return [chance.randrange(3, 96) for _ in range(chance.randrange(1, 40))], chance.randrange(1, 24)


def answers_alone(loaded: LoadedModel) -> dict[int, tuple[list[int], list[float]]]:
    found = {}
    for number in range(PROMPTS):
        prompt, count = prompt_of(number)
        alone = generate(loaded.model, prompt, sites=loaded.sites, dtype=loaded.dtype, max_tokens=count)
        found[number] = (alone.token_ids, alone.margins)
    return found


async def one_stream(service: Service, stream: int, count: int, alone: dict, totals: dict) -> None:
    chance = random.Random(1000 + stream)
    for turn in range(count):
        number = chance.randrange(PROMPTS)
        prompt, length = prompt_of(number)
        fate = chance.random()
        leaves_after = chance.randrange(1, length + 1) if fate < 0.1 else 0
        name = f"{stream}-{turn}"
        got: list[int] = []
        answer = service.generate(request(name, prompt, max_tokens=length, ignore_eos=True))
        async for output in answer:
            got += output.token_ids
            if fate > 0.9 and len(got) == 1:
                service.abort(name)
            if leaves_after and len(got) >= leaves_after:
                await answer.aclose()
                break
        expected, margins = alone[number]
        decided = next((at for at, margin in enumerate(margins) if margin < SLACK), len(margins))
        assert got[:decided] == expected[: min(len(got), decided)]
        assert fate > 0.9 or leaves_after or len(got) == length
        totals["done"] += 1
        if totals["done"] % max(1, totals["wanted"] // 10) == 0:
            gc.collect()
            totals["resident"].append(resident_bytes())


def soak(folder: Path, count: int, streams: int = STREAMS) -> dict:
    alone = answers_alone(load_model(folder))
    options = EngineOptions(
        max_num_sequences=24, max_num_batched_tokens=64, page_size=8, num_pages=60, enforce_eager=True
    )
    totals: dict = {"done": 0, "wanted": streams * count, "resident": []}

    async def run() -> None:
        await asyncio.gather(*(one_stream(service, stream, count, alone, totals) for stream in range(streams)))

    service = Service(lambda report: open_engine(folder, engine=options)).start()
    service.wait_ready()
    asyncio.run(run())
    service.close()
    assert service.engine is not None
    assert service.engine.pool.num_held == 0 and not service.engine.scheduler.has_work
    totals["preempted"] = service.engine.status.num_preempted
    return totals


def test_a_few_requests_of_many_streams(tmp_path: Path) -> None:
    assert soak(tiny_folder("llama", tmp_path, num_hidden_layers=1), 2, streams=24)["done"] == 48


@pytest.mark.slow
def test_a_tenth_of_the_requests(tmp_path: Path) -> None:
    totals = soak(tiny_folder("llama", tmp_path), 50)
    assert totals["done"] == 3200
    assert totals["preempted"] > 0, "there were to be too few pages"
    assert totals["resident"][-1] <= 1.05 * totals["resident"][0], totals["resident"]


@pytest.mark.soak
def test_all_requests(tmp_path: Path) -> None:
    totals = soak(tiny_folder("llama", tmp_path), 500)
    assert totals["done"] == 32000
    assert totals["preempted"] > 0, "there were to be too few pages"
    assert totals["resident"][-1] <= 1.05 * totals["resident"][0], totals["resident"]
