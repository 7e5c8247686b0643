"""On a GPU: an engine climbs from eager to compiled to captured, and says the same on each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import VOCABULARY, tiny_folder

import piecework as pw
from piecework.api.serving import open_engine
from piecework.capture_events import CaptureFailed, Uncovered
from piecework.engine.offline import answer_all
from piecework.engine.options import EngineOptions
from piecework.engine.sequence import Request, SamplingParameters
from piecework.engine.tiers import CAPTURED, EAGER
from piecework.events import FallBack, Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
LIMITS: dict[str, Any] = {"max_num_sequences": 12, "max_num_batched_tokens": 64, "max_length": 128, "num_pages": 200}


def requests() -> list[Request]:
    rng = random.Random(0)
    return [
        Request(
            str(number),
            tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 90))),
            SamplingParameters(max_tokens=rng.randint(1, 24), ignore_eos=True),
        )
        for number in range(24)
    ]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "llama"])  # llama's heads are too narrow for our kernels
def test_answers_are_the_same_on_every_tier(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(architecture, tmp_path / "model")
    given: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    plain = open_engine(folder, engine=EngineOptions(enforce_eager=True, **LIMITS), **given)
    wanted = answer_all(plain, requests())
    assert not any(plain.status.tokens_by_tier[EAGER + 1 :])
    plain.close()
    watch, store = Recorder(), pw.DiskStore(tmp_path / "store")
    waiting = EngineOptions(wait_for="captured", **LIMITS)
    for _ in ("cold", "warm"):
        engine = open_engine(folder, engine=waiting, store=store, observer=watch, **given)
        before = engine.status.tokens_by_tier
        found = answer_all(engine, requests())
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
        assert engine.status.tokens_by_tier[:CAPTURED] == before[:CAPTURED]
        engine.close()
    assert [event.reason for event in watch.of(FallBack)] == []
    assert [event.reason for event in watch.of(CaptureFailed)] == []
    assert not watch.of(Uncovered)


def test_500_random_requests_after_ready_compile_nothing(tmp_path: Path) -> None:
    """Where Triton could: a kernel that no start-up step ran would be compiled while somebody waits."""
    folder, rng = tiny_folder("qwen3", tmp_path / "model"), random.Random(1)
    waiting = EngineOptions(wait_for="captured", **LIMITS)
    engine = open_engine(folder, engine=waiting, store=pw.DiskStore(tmp_path / "store"), device="cuda", dtype="float32")
    asked = [
        Request(
            str(number),
            tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 90))),
            SamplingParameters(
                max_tokens=rng.randint(1, 24), ignore_eos=True, temperature=rng.choice([0.0, 0.8]), seed=number,
                top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.9]), presence_penalty=rng.choice([0.0, 0.5]),
            ),
        )
        for number in range(500)
    ]  # fmt: skip
    with pw.no_compile():
        found = [answer for first in range(0, 500, 20) for answer in answer_all(engine, asked[first : first + 20])]
    assert len(found) == 500 and all(answer.token_ids for answer in found)
    engine.close()
