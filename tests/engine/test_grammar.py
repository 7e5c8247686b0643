"""Answers are held to a JSON schema, whatever the model would rather say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.counting import drain, request, tokens
from piecework.api.serving import open_engine
from piecework.engine.loop import Engine
from piecework.engine.options import EngineOptions
from piecework.engine.sequence import SamplingParameters
from piecework.errors import OptionError
from tiny_models import VOCABULARY, tiny_folder

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPTIONS = EngineOptions(max_num_sequences=4, max_num_batched_tokens=64, num_pages=96, page_size=8, enforce_eager=True)


def characters(folder: Path) -> Path:
    """Give a model a tokenizer of printable characters, each a token."""
    words = ["<unk>", "<s>", "</s>", "Ġ", *(chr(code) for code in range(33, 127) if chr(code) not in "~`")]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(words[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert len(words) == VOCABULARY
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=[2, None], ids=["with an end", "without an end"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Open a model whose tokens are characters."""
    folder = tiny_folder("llama", tmp_path_factory.mktemp("grammar") / "model", eos_token_id=request.param)
    return open_engine(characters(folder), engine=OPTIONS)


def text_of(engine: Engine, ids: list[int]) -> str:
    assert engine.served.tokenizer is not None
    return str(engine.served.tokenizer.decode(ids))


@pytest.mark.parametrize(
    "parameters",
    [
        {}, {"temperature": 1.5, "seed": 3, "n": 3}, {"temperature": 1.0, "seed": 4, "top_k": 2},
        {"presence_penalty": 1.0}, {"min_tokens": 190}, {"ignore_eos": True},
    ],
)  # fmt: skip
def test_every_answer_fits_the_schema_beside_answers_that_are_free(
    engine: Engine, parameters: dict[str, object]
) -> None:
    schema = json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    held = request("held", [40, 41, 42], max_tokens=200, json_schema=schema, **parameters)
    engine.submit(held)
    engine.submit(request("free", [40, 41, 42], max_tokens=9, ignore_eos=True))
    found = drain(engine)
    for index in range(held.parameters.n):
        answer = json.loads(text_of(engine, tokens(found["held", index])))
        assert answer["name"] in ("ada", "bob") and 0 <= answer["age"] <= 99 and len(answer) == 2
        assert found["held", index][-1].finish_reason == "stop"
    engine.submit(request("alone", [40, 41, 42], max_tokens=9, ignore_eos=True))
    assert tokens(drain(engine)["alone", 0]) == tokens(found["free", 0])
    assert engine.pool.num_held == 0


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ('{"type": "objec"}', "answers cannot be held to the schema: Invalid type: objec"),
        ('{"type": "object", "if": {}}', "answers cannot be held to the schema: Unimplemented keys"),
        ('{"$ref": "http://elsewhere/x"}', "answers cannot be held to the schema"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_refused_before_anything_runs(
    engine: Engine, schema: str, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        engine.submit(request("wrong", [40], json_schema=schema))
    assert not engine.has_work


@pytest.mark.parametrize("schema", ["{", "[1]", '"text"'])
def test_what_is_no_schema_is_told_when_parameters_are_made(schema: str) -> None:
    with pytest.raises(OptionError, match="`json_schema` is"):
        SamplingParameters(json_schema=schema)


def test_a_model_without_a_tokenizer_says_so(engine: Engine) -> None:
    bare = Engine(replace(engine.served, tokenizer=None), OPTIONS)
    with pytest.raises(OptionError, match="a schema needs a tokenizer"):
        bare.submit(request("wrong", [40], json_schema='{"type": "object"}'))
