"""Greedy generation of one sequence: chunks, ends, limits, and the same tokens as Transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piecework.engine.generate import GeneratedToken, generate, generate_tokens
from piecework.errors import OptionError
from piecework.models.folder import KvSite
from piecework.models.hugging_face import load_model
from piecework.ops import current_step
from tiny_models import tiny_folder, tiny_model

SITES = (KvSite("layers.0", 1, 4),)
VOCABULARY = 50


class Counting:
    """A model whose next token is the last one plus one; it keeps what each step was."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], list[int], list[int], list[int]]] = []

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        step = current_step("test", "layers.0")
        self.steps.append((input_ids[0].tolist(), position_ids[0].tolist(), rows.tolist(), step.slots.tolist()))
        logits = torch.zeros(1, len(rows), VOCABULARY)
        for index, row in enumerate(rows.tolist()):
            logits[0, index, int(input_ids[0, row]) + 1] = 3.0
        return logits


def run(model: Counting, prompt: Sequence[int], max_tokens: int = 4, **more: object) -> list[int]:
    result = generate(model, prompt, sites=SITES, dtype=torch.float32, max_tokens=max_tokens, **more)  # type: ignore[arg-type]
    return result.token_ids


def test_prefill_goes_in_chunks_and_decode_token_by_token() -> None:
    model = Counting()
    assert run(model, [1, 2, 3, 4, 5], 3, max_num_batched_tokens=2) == [6, 7, 8]
    assert model.steps == [
        ([1, 2], [0, 1], [1, 1], [0, 1]),
        ([3, 4], [2, 3], [1, 1], [2, 3]),
        ([5], [4], [0, 0], [4]),
        ([6], [5], [0, 0], [5]),
        ([7], [6], [0, 0], [6]),
    ]


def test_margins_times_and_the_caller_are_told() -> None:
    seen: list[GeneratedToken] = []
    result = generate(Counting(), [1], sites=SITES, dtype=torch.float32, max_tokens=3, on_token=seen.append)
    assert list(result.tokens) == seen
    assert result.margins == [3.0, 3.0, 3.0]
    assert all(token.elapsed_s > 0 for token in seen)
    assert result.finished == "length" and result.num_prompt_tokens == 1
    assert result.first_token_s == seen[0].elapsed_s
    assert result.tokens_per_s == pytest.approx(2 / (seen[1].elapsed_s + seen[2].elapsed_s))


def test_it_stops_at_an_end_token() -> None:
    result = generate(Counting(), [1, 2], sites=SITES, dtype=torch.float32, max_tokens=9, end_of_sequence={5, 40})
    assert (result.token_ids, result.finished) == ([3, 4, 5], "stop")


def test_no_tokens_asked_for_runs_nothing() -> None:
    model = Counting()
    assert run(model, [1], 0) == [] and model.steps == []


def test_positions_end_where_the_model_says() -> None:
    assert run(Counting(), [1, 2, 3], 9, max_positions=5) == [4, 5, 6]
    with pytest.raises(OptionError, match="the prompt has 6 tokens, and the model's positions end at 5"):
        run(Counting(), [1] * 6, max_positions=5)


@pytest.mark.parametrize(
    ("prompt", "more", "text"),
    [
        ([], {}, "the prompt has no tokens"),
        ([1], {"max_tokens": -1}, "`max_tokens=-1`"),
        ([1], {"max_num_batched_tokens": 0}, "`max_num_batched_tokens=0`"),
    ],
)
def test_what_cannot_be_generated(prompt: list[int], more: dict[str, int], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        run(Counting(), prompt, **more)


def test_tokens_come_when_they_are_asked_for() -> None:
    model = Counting()
    stream = generate_tokens(model, [1, 2], sites=SITES, dtype=torch.float32, max_tokens=5)
    assert next(stream).token_id == 3 and len(model.steps) == 1
    assert next(stream).token_id == 4 and len(model.steps) == 2


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
def test_the_same_tokens_as_transformers_generate(architecture: str, tmp_path: Path) -> None:
    loaded = load_model(tiny_folder(architecture, tmp_path))
    own = tiny_model(architecture)
    prompt = [int(token) for token in torch.randint(3, 96, (13,), generator=torch.Generator().manual_seed(3))]
    expected = own.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    result = generate(
        loaded.model, prompt, sites=loaded.sites, dtype=loaded.dtype, max_tokens=12, max_num_batched_tokens=5
    )
    assert min(result.margins) > 1e-4
    assert result.token_ids == expected
