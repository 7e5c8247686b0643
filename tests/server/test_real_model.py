"""The real small model behind the real client: its answers are those of the model library, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scripts.real_model import real_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from piecework.engine.options import EngineOptions
from server.serving import NAME, Running, running

MAX_TOKENS = 24
MARGIN = 1e-3  # of two logits whose order rounding may not turn
TALK = [{"role": "user", "content": "What is the capital of France? Größe, 日本語, 🙂!"}]


@pytest.fixture(scope="module")
def model_folder() -> Path:
    """Write the model once."""
    return real_model()


@pytest.fixture(scope="module")
def real(model_folder: Path) -> Iterator[Running]:
    """Serve the model."""
    options = EngineOptions(num_pages=256, max_num_sequences=8, max_num_batched_tokens=256, enforce_eager=True)
    with running(model_folder, engine=options) as found:
        yield found


@pytest.mark.slow
def test_chat_and_completion_are_the_models_own(real: Running, model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    prompt = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    asked = {"messages": TALK, "return_token_strs": True}
    assert real.ask("POST", "/tokenize", asked)[2]["tokens"] == ids[0].tolist()
    wanted, sure = greedy(model, ids)
    assert sure > MAX_TOKENS // 2

    client = real.client()
    answer = client.chat.completions.create(
        model=NAME, messages=TALK, max_tokens=MAX_TOKENS, temperature=0, logprobs=True, top_logprobs=1  # type: ignore[arg-type]
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    told = [each.token for each in choice.logprobs.content]
    assert told[:sure] == [tokenizer.decode([token]) for token in wanted[:sure]]
    assert answer.usage is not None and answer.usage.prompt_tokens == ids.shape[1]

    # Piece by piece, as a completion of the same text, and with strings of bytes that are cut within a character.
    pieces = client.completions.create(model=NAME, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == choice.message.content
    body = {"prompt": "Repeat: 🙂 日本語 🙂 日本語 🙂", "max_tokens": 20, "temperature": 0}
    whole = real.ask("POST", "/v1/completions", body)[2]["choices"][0]["text"]
    lines = real.ask("POST", "/v1/completions", body | {"stream": True})[2].splitlines()
    streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == whole
    assert real.misses == []


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 1.2, "seed": 7, "n": 2}, {"stream": True}])
def test_answers_fit_the_schema_that_the_client_sends(real: Running, asked: dict[str, object]) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer"},
            "languages": {"type": "array", "items": {"enum": ["French", "German"]}, "maxItems": 3},
        },
        "required": ["city", "population", "languages"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = real.client().chat.completions.create(
        model=NAME, messages=TALK, max_tokens=120, response_format=form, **asked  # type: ignore[call-overload]
    )
    if "stream" in asked:
        texts = ["".join(chunk.choices[0].delta.content or "" for chunk in answer)]
    else:
        texts = [choice.message.content for choice in answer.choices]
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for text in texts:
        found = json.loads(text)
        assert set(found) == {"city", "population", "languages"} and isinstance(found["population"], int)
        assert len(found["city"]) <= 20 and set(found["languages"]) <= {"French", "German"}


def greedy(model: torch.nn.Module, ids: torch.Tensor) -> tuple[list[int], int]:
    """Return the model library's own tokens, and how many come before two logits are too near to tell apart."""
    with torch.no_grad():
        found = model.generate(  # type: ignore[operator]
            ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    tops = [scores[0].topk(2).values for scores in found.scores]
    sure = next((n for n, (first, second) in enumerate(tops) if first - second < MARGIN), len(tops))
    return found.sequences[0, ids.shape[1] :].tolist(), sure
