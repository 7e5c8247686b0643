"""The engine's loop: batches, chunks, pages, ends, and the one-request answer whoever else is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.counting import Adding, drain, expected, request, served, small_engine, tokens
from piecework.api.serving import open_engine
from piecework.engine.events import TierFailed
from piecework.engine.generate import generate
from piecework.engine.loop import Engine
from piecework.engine.options import EngineOptions
from piecework.engine.sequence import SamplingParameters
from piecework.engine.tiers import Tiers
from piecework.errors import OptionError
from piecework.events import Recorder
from piecework.models.hugging_face import load_model
from tiny_models import tiny_folder


def test_several_requests_share_steps_and_each_gets_its_own_answer() -> None:
    model = Adding()
    engine = small_engine(model)
    prompts = {f"r{n}": [n + 1, n + 2, n + 3] for n in range(6)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=5))
    found = drain(engine)
    for name, prompt in prompts.items():
        assert tokens(found[name, 0]) == expected(prompt, 5)
        assert [each.finish_reason for each in found[name, 0]] == [None] * 4 + ["length"]
    assert max(sequences for _, sequences in model.steps) == 4
    assert max(count for count, _ in model.steps) <= 8
    assert engine.pool.num_held == 0 and not engine.has_work


def test_a_long_prompt_goes_in_chunks_beside_those_that_decode() -> None:
    model = Adding()
    engine = small_engine(model)
    engine.submit(request("short", [1, 2], max_tokens=6))
    engine.step()
    engine.submit(request("long", list(range(1, 20)), max_tokens=2))
    engine.step()
    assert model.steps[1:] == [(8, 2)]
    found = drain(engine)
    assert tokens(found["long", 0]) == expected(list(range(1, 20)), 2)
    assert model.steps[2:4] == [(8, 2), (6, 2)]


def test_pages_of_equal_beginnings_are_shared_and_counted() -> None:
    engine = small_engine()
    prompt = list(range(1, 11))
    engine.submit(request("first", prompt, max_tokens=1))
    drain(engine)
    engine.submit(request("second", [*prompt, 7], max_tokens=3))
    found = drain(engine)
    assert found["second", 0][0].num_cached_tokens == 8
    assert tokens(found["second", 0]) == expected([*prompt, 7], 3)
    assert engine.status.num_cached_tokens == 8


def test_with_too_few_pages_the_youngest_waits_and_all_are_answered() -> None:
    engine = small_engine(num_pages=6, share_prefixes=False)
    prompts = {f"r{n}": [n + 1, n + 2, n + 3, n + 4] for n in range(4)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=12))
    found = drain(engine)
    assert {name: tokens(found[name, 0]) for name in prompts} == {n: expected(p, 12) for n, p in prompts.items()}
    assert engine.status.num_preempted > 0
    assert engine.pool.num_held == 0


def test_an_abort_frees_pages_at_once_and_says_so() -> None:
    engine = small_engine()
    engine.submit(request("a", [1, 2, 3], max_tokens=9, n=2))
    engine.step()
    engine.abort("a")
    assert engine.pool.num_held == 0
    assert [(each.index, each.finish_reason) for each in engine.step()] == [(0, "abort"), (1, "abort")]
    engine.abort("a")
    assert not engine.has_work


def test_an_answer_ends_at_a_stop_token_at_the_longest_length_and_not_before_its_least() -> None:
    answer = expected([1, 2], 8)
    engine = small_engine(max_length=7)
    engine.submit(request("stop", [1, 2], max_tokens=8, stop_token_ids=(answer[2],)))
    engine.submit(request("full", [1, 2], max_tokens=8))
    found = drain(engine)
    assert tokens(found["stop", 0]) == answer[:3]
    assert (found["stop", 0][-1].finish_reason, found["stop", 0][-1].stop_reason) == ("stop", answer[2])
    assert tokens(found["full", 0]) == answer[:5]
    assert found["full", 0][-1].finish_reason == "length"
    engine.submit(request("least", [1, 2], max_tokens=4, min_tokens=3, stop_token_ids=(answer[0],)))
    assert len(tokens(drain(engine)["least", 0])) == 4


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"max_tokens": 0}, "`max_tokens` is `0`"),
        ({"temperature": -1}, "`temperature` is `-1`"),
        ({"temperature": float("nan")}, "`temperature` is `nan`"),
        ({"top_p": 0}, "`top_p` is `0`"),
        ({"top_k": True}, "`top_k` is `True`"),
        ({"min_tokens": 9, "max_tokens": 8}, "`min_tokens=9` is above `max_tokens=8`"),
        ({"stop": ("",)}, "`stop` is"),
        ({"stop_token_ids": ("a",)}, "`stop_token_ids` is"),
        ({"logprobs": 99}, "`logprobs` is `99`"),
        ({"n": 0}, "`n` is `0`"),
        ({"seed": "x"}, "`seed` is `'x'`"),
    ],
)
def test_what_has_no_meaning_is_said(parameters: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text.replace("(", r"\(")):
        SamplingParameters(**parameters)  # type: ignore[arg-type]


def test_what_can_never_be_answered_is_said() -> None:
    engine = small_engine(max_length=8)
    with pytest.raises(OptionError, match="the prompt has 8 tokens, and a prompt with its answer may have 8"):
        engine.submit(request("a", [1] * 8))
    with pytest.raises(OptionError, match="token id `64` is not in the model's vocabulary"):
        engine.submit(request("a", [64]))
    with pytest.raises(OptionError, match="the prompt has no tokens"):
        request("a", [])
    with pytest.raises(OptionError, match="`stop` strings need a tokenizer"):
        engine.submit(request("a", [1], stop=("x",)))
    engine.submit(request("a", [1]))
    with pytest.raises(OptionError, match="request `a` is under way already"):
        engine.submit(request("a", [1]))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_a_real_model_in_a_batch_answers_as_alone(architecture: str, tmp_path: Path) -> None:
    folder = tiny_folder(architecture, tmp_path)
    loaded = load_model(folder)
    options = EngineOptions(
        max_num_sequences=3, max_num_batched_tokens=7, page_size=4, num_pages=40, enforce_eager=True
    )
    engine = open_engine(folder, engine=options)
    random = torch.Generator().manual_seed(5)
    prompts = {f"r{n}": torch.randint(3, 96, (3 + 4 * n,), generator=random).tolist() for n in range(5)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=9, ignore_eos=True))
    found = drain(engine)
    for name, prompt in prompts.items():
        alone = generate(loaded.model, prompt, sites=loaded.sites, dtype=loaded.dtype, max_tokens=9)
        decided = next((n for n, margin in enumerate(alone.margins) if margin < 1e-4), 9)
        assert decided > 3
        assert tokens(found[name, 0])[:decided] == alone.token_ids[:decided]
    assert engine.pool.num_held == 0


def test_a_tier_that_raises_while_it_serves_is_left_and_no_request_notices() -> None:
    class Breaking(Adding):
        def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
            logits = super().__call__(input_ids, position_ids, rows)
            if len(self.steps) == 4:
                raise RuntimeError("an illegal address")
            return logits

    recorder = Recorder()
    tiers = Tiers(Adding(), recorder)
    tiers.swap_in(1, Breaking())
    options = EngineOptions(max_num_sequences=4, max_num_batched_tokens=8, page_size=4, num_pages=16)
    engine = Engine(served(), options, tiers=tiers)
    prompts = {f"r{n}": [n + 1, n + 2] for n in range(3)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=7))
    found = drain(engine)
    assert {name: tokens(found[name, 0]) for name in prompts} == {n: expected(p, 7) for n, p in prompts.items()}
    assert engine.status.tier == 0 and engine.status.trouble == "tier 1: RuntimeError: an illegal address"
    assert [each.tier for each in recorder.of(TierFailed)] == [1]
    assert engine.status.steps_by_tier[:2] == (engine.status.num_steps - 3, 3)
