"""pw.LLM through the engine: prompts answered together, each as its parameters ask."""

from __future__ import annotations

from pathlib import Path

import pytest

import piecework as pw
from engine.test_text import byte_tokenizer
from piecework.engine.offline import Answer
from piecework.errors import OptionError
from tiny_models import tiny_folder

PROMPTS = [list(range(5, 5 + count)) for count in (3, 9, 20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pw.LLM:
    folder = tiny_folder("llama", tmp_path_factory.mktemp("offline") / "model", vocab_size=256)
    byte_tokenizer().save(str(Path(folder) / "tokenizer.json"))
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),))
    return pw.LLM(folder, options=options, store=pw.MemoryStore())


def test_prompts_together_are_answered_as_one_by_one(model: pw.LLM) -> None:
    alone = model.generate(PROMPTS, max_tokens=8, ignore_eos=True)
    assert min(margin for each in alone for margin in each.generation.margins) > 1e-4
    together = model.generate(PROMPTS, pw.SamplingParameters(max_tokens=8, ignore_eos=True))
    assert [list(each.token_ids) for each in together] == [each.token_ids for each in alone]
    assert [each.text for each in together] == [each.text for each in alone]
    assert {each.finish_reason for each in together} == {"length"}
    assert model.engine.pool.num_held == 0


def test_each_prompt_may_have_parameters_of_its_own(model: pw.LLM) -> None:
    given = [
        pw.SamplingParameters(max_tokens=3, ignore_eos=True, logprobs=2),
        pw.SamplingParameters(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3, n=2),
    ]
    first, second, third = model.generate(PROMPTS[:2], given)
    assert isinstance(first, Answer) and first.logprobs is not None and len(first.logprobs) == 3
    assert first.logprobs[0].top[0] == (first.token_ids[0], first.logprobs[0].logprob)
    assert (second.index, third.index) == (0, 1) and second.logprobs is None
    assert second.token_ids != third.token_ids
    assert model.generate(PROMPTS[:2], given)[1:] == [second, third]


def test_a_stop_string_ends_the_text_before_it(model: pw.LLM) -> None:
    (whole,) = model.generate([PROMPTS[0]], pw.SamplingParameters(max_tokens=12, ignore_eos=True))
    stop = whole.text[2:4]
    (cut,) = model.generate([PROMPTS[0]], pw.SamplingParameters(max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_what_does_not_fit_together_is_said(model: pw.LLM) -> None:
    with pytest.raises(OptionError, match="there are 2 prompts and 1 sets of parameters"):
        model.generate(PROMPTS[:2], [pw.SamplingParameters()])
    with pytest.raises(OptionError, match="the prompt has 300 tokens, and a prompt with its answer may have 256"):
        model.generate([[5] * 300], pw.SamplingParameters())
