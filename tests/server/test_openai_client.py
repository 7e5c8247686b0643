"""The real client of OpenAI against a real server: what it reads is what the engine computed."""

from __future__ import annotations

import openai
import pytest

from piecework.engine.loop import Engine
from piecework.engine.sequence import Request, SamplingParameters
from server.serving import NAME, Running, running

PROMPT = "w5 w6 w7 w8"


def alone(server: Running, prompt: str, **parameters: object) -> tuple[str, list[int]]:
    """Answer a prompt by an engine of its own, without a server."""
    assert server.engine is not None
    served = server.engine.served
    assert served.tokenizer is not None
    engine = Engine(served, server.engine.options)
    engine.submit(Request("alone", tuple(served.tokenizer.encode(prompt).ids), SamplingParameters(**parameters)))  # type: ignore[arg-type]
    text, ids = "", []
    while engine.has_work:
        for output in engine.step():
            text += output.text
            ids += output.token_ids
    return text, ids


def test_a_completion_is_what_the_engine_computes(server: Running) -> None:
    text, _ = alone(server, PROMPT, max_tokens=12)
    answer = server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (text, "length", 0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 12, 16)
    assert (answer.object, answer.model) == ("text_completion", NAME)


def test_a_stream_gives_the_same_text_piece_by_piece(server: Running) -> None:
    text, _ = alone(server, PROMPT, max_tokens=12)
    options = {"include_usage": True}
    chunks = list(
        server.client().completions.create(
            model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stream=True, stream_options=options,  # type: ignore[call-overload]
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert len(chunks) == 13  # a piece a token: nothing waits for the rest
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 11 + ["length"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)


def test_prompts_side_by_side_and_n_answers_of_each(server: Running) -> None:
    prompts = [PROMPT, "w9 w9"]
    answer = server.client().completions.create(model=NAME, prompt=prompts, max_tokens=5, temperature=0, n=2)
    wanted = [alone(server, prompt, max_tokens=5)[0] for prompt in prompts for _ in range(2)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == wanted
    assert answer.usage is not None and answer.usage.completion_tokens == 20


def test_token_ids_are_a_prompt(server: Running) -> None:
    by_ids = server.client().completions.create(model=NAME, prompt=[5, 6, 7, 8], max_tokens=4, temperature=0)
    assert by_ids.choices[0].text == alone(server, PROMPT, max_tokens=4)[0]
    echoed = server.client().completions.create(model=NAME, prompt=[5, 6], max_tokens=1, temperature=0, echo=True)
    assert echoed.choices[0].text.startswith("w5w6")


def test_a_stop_string_ends_the_answer_and_is_not_in_it(server: Running) -> None:
    text, ids = alone(server, PROMPT, max_tokens=12)
    stop = f"w{ids[5]}"
    answer = server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": stop}


def test_logprobs_of_a_completion(server: Running) -> None:
    answer = server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert "".join(found.tokens) == answer.choices[0].text
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == value == max(top.values()) < 0
        assert len(top) == 3
    assert [answer.choices[0].text[at:].startswith(t) for at, t in zip(found.text_offset, found.tokens, strict=True)]


def test_a_seed_gives_the_same_answer_again(server: Running) -> None:
    def sample(seed: int) -> str:
        return server.client().completions.create(
            model=NAME, prompt=PROMPT, max_tokens=12, temperature=1.5, seed=seed, extra_body={"top_k": 50}
        ).choices[0].text  # fmt: skip

    assert sample(1) == sample(1) != sample(2)


def test_chat_goes_through_the_template(server: Running) -> None:
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": [{"type": "text", "text": "w2"}]}]
    text, _ = alone(server, "w1 w2 w3", max_tokens=6)
    client = server.client()
    whole = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2  # type: ignore[arg-type]
    )  # fmt: skip
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content) == text
    assert all(bytes(each.bytes or ()).decode() == each.token for each in choice.logprobs.content)
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * 6
    pieces = list(client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=6, temperature=0, stream=True, n=2,  # type: ignore[call-overload]
    ))  # fmt: skip
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in pieces if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in mine) == text
        assert mine[-1].finish_reason == "length"


def test_without_max_tokens_a_chat_goes_on_to_the_end_of_the_model(server: Running) -> None:
    answer = server.client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "w1"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_models_tokens_and_version(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).model_extra == {"root": NAME, "max_model_len": 256}
    assert server.ask("POST", "/tokenize", {"prompt": "w1 w2"})[2] == {
        "count": 2, "max_model_len": 256, "tokens": [1, 2], "token_strs": None,
    }  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "w9"}], "return_token_strs": True}
    assert server.ask("POST", "/tokenize", chat)[2]["token_strs"] == ["w9", "w3"]
    assert server.ask("POST", "/detokenize", {"tokens": [4, 5]})[2] == {"prompt": "w4w5"}
    assert set(server.ask("GET", "/version")[2]) == {"version"}


@pytest.mark.parametrize(
    ("body", "kind", "status", "param", "said"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, 404, "model", "the model `gpt-4` does not exist here"),
        ({"prompt": []}, openai.BadRequestError, 400, "prompt", "`prompt` is an empty list"),
        ({"prompt": ""}, openai.BadRequestError, 400, "prompt", "the prompt has no tokens"),
        ({"prompt": [1, 96]}, openai.BadRequestError, 400, "prompt", "token id `96` is not in the model's vocabulary"),
        ({"max_tokens": 300}, openai.BadRequestError, 400, "max_tokens", "the prompt has 4 tokens, and `max_tokens`"),
        ({"temperature": -1}, openai.BadRequestError, 400, "temperature", "`temperature`: Input should be greater"),
        ({"logit_bias": {"1": 5}}, openai.BadRequestError, 400, None, "`logit_bias` is not served"),
        (
            {"extra_body": {"response_format": {"type": "json_object"}}}, openai.BadRequestError, 400, None,
            "answers of this model cannot be held to a schema",  # its tokenizer is of words, not of bytes
        ),
        (
            {"extra_body": {"response_format": {"type": "json_schema"}}},
            openai.BadRequestError, 400, "response_format",
            "`response_format`: `response_format` of type `json_schema` needs",
        ),
        ({"n": 100}, openai.BadRequestError, 400, "n", "1 prompts answered 100 times each are more than 64 answers"),
    ],
)  # fmt: skip
def test_what_is_refused_comes_in_openais_form(
    server: Running, body: dict[str, object], kind: type[openai.APIStatusError], status: int, param: str, said: str
) -> None:
    with pytest.raises(kind) as caught:
        server.client().completions.create(**{"model": NAME, "prompt": PROMPT, **body})  # type: ignore[call-overload]
    error = caught.value
    assert (error.status_code, error.param) == (status, param)
    assert isinstance(error.body, dict)
    assert error.body["message"].startswith(said)
    assert error.body["hint"]


def test_a_template_may_refuse(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="refuses these messages: no such role"):
        server.client().chat.completions.create(model=NAME, messages=[{"role": "judge", "content": "w1"}])  # type: ignore[list-item, misc]


def test_unknown_fields_are_ignored_and_named(server: Running) -> None:
    raw = server.client().completions.with_raw_response.create(
        model=NAME, prompt=PROMPT, max_tokens=1, extra_body={"max_token": 5, "metadata": {}}
    )
    assert raw.headers["X-Piecework-Ignored"] == "max_token"


def test_a_request_id_comes_back(server: Running) -> None:
    assert server.ask("GET", "/version", X_Request_Id="mine-1")[1]["x-request-id"] == "mine-1"
    made = server.ask("GET", "/version", X_Request_Id="not one")[1]["x-request-id"]
    assert len(made) == 32 and made != "not one"


def test_a_key_is_asked_for(server: Running) -> None:
    with running(server.folder, api_keys=("right", "other")) as found:
        with pytest.raises(openai.AuthenticationError, match="no valid API key") as caught:
            found.client(api_key="wrong").models.list()
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert found.client(api_key="other").models.list().data[0].id == NAME
        assert found.ask("POST", "/tokenize", {"prompt": "w1"})[0] == 401
        assert [found.ask("GET", path)[0] for path in ("/livez", "/readyz", "/health", "/metrics")] == [200] * 4
