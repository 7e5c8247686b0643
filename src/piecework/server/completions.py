"""`/v1/completions`: text in, text out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from piecework.engine.sequence import Output, TokenLogprobs
from piecework.server.answers import Completion
from piecework.server.bodies import Json
from piecework.server.events import EventStream, guarded, unless_gone
from piecework.server.faults import Refusal
from piecework.server.front import REFUSALS, Front
from piecework.server.generation import Asked, ServedModel, collect, parameters_of, room_for, usage_of
from piecework.server.requests import CompletionBody
from piecework.server.streaming import Growth, stream
from piecework.server.words import Words


def make_router(front: Front) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", response_model=Completion, responses=REFUSALS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or several; with `stream`, piece by piece as server-sent events."""
        front.check_model(body.model)
        model = front.model
        asked = await _read(model, body, front.options.max_choices)
        form = _CompletionForm(front.names[0], model.words, body, asked)
        place = front.gate.admit(asked.num_answers)
        if body.stream:
            chunks = stream(model, asked, form, body.stream_options, front.metrics)
            return EventStream(guarded(chunks), front.headers(body), place.leave)
        with place:
            found = await unless_gone(request, collect(model, asked, front.metrics))
        choices = [
            form.choice(number, form.echo(number) + answer.text, answer.logprobs, 0, answer)
            for number, answer in enumerate(found)
        ]
        usage = usage_of(asked, sum(answer.num_tokens for answer in found))
        return Json(form.chunk(choices) | {"usage": usage}, headers=front.headers(body))

    return router


async def _read(model: ServedModel, body: CompletionBody, max_choices: int) -> Asked:
    """Return what a body asks for, its prompts as token ids."""
    given: Sequence[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not given:
        raise Refusal(400, "`prompt` is an empty list", hint="give a text or token ids", param="prompt")
    if isinstance(given[0], int):
        given = [given]
    if len(given) * (body.n or 1) > max_choices:
        raise Refusal(
            400,
            f"{len(given)} prompts answered {body.n or 1} times each are more than {max_choices} answers",
            hint="send fewer prompts, or a smaller `n`; the server's `--max-choices` is the limit",
            param="n",
            code="too_many_answers",
        )
    prompts = [
        model.words.check(each, "prompt")
        if isinstance(each, list)
        else await model.words.encode(each, add_special_tokens=body.add_special_tokens)
        for each in given
    ]
    max_tokens = room_for(prompts, body.max_tokens, model.max_length, "prompt")
    parameters = parameters_of(body, max_tokens=max_tokens, logprobs=body.logprobs)
    return Asked(f"cmpl-{uuid.uuid4().hex}", tuple(map(tuple, prompts)), parameters)


class _CompletionForm:
    """Puts answers into the form of `/v1/completions`."""

    def __init__(self, model_name: str, words: Words, body: CompletionBody, asked: Asked) -> None:
        self._head = {
            "id": asked.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._words = words
        self._body = body
        self._asked = asked

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk, or the body, with these choices."""
        return {**self._head, "choices": choices}

    def opening(self, number: int) -> dict[str, Any] | None:
        """Return the prompt, where it is to be echoed."""
        text = self.echo(number)
        return self.choice(number, text, (), 0, None) if text else None

    def delta(self, number: int, output: Output, growth: Growth) -> dict[str, Any]:
        """Return what a step added."""
        return self.choice(number, output.text, output.logprobs or (), growth.num_characters, output)

    def choice(
        self, number: int, text: str, logprobs: Sequence[TokenLogprobs], offset: int, ended: Any
    ) -> dict[str, Any]:
        """Return one choice; `ended` says whether and why it ended."""
        asks = self._body.logprobs is not None
        return {
            "index": number,
            "text": text,
            "logprobs": self._logprobs(logprobs, offset) if asks else None,
            "finish_reason": getattr(ended, "finish_reason", None),
            "stop_reason": getattr(ended, "stop_reason", None),
        }

    def echo(self, number: int) -> str:
        """Return the text of an answer's prompt, where it is asked for."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompt
        at = number // self._asked.parameters.n
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], str):
            return str(prompt[at])
        return "".join(self._words.token_text(token) for token in self._asked.prompts[at])

    def _logprobs(self, found: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        texts = [self._words.token_text(each.token_id) for each in found]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        tops = [
            {self._words.token_text(token): value for token, value in (*each.top, (each.token_id, each.logprob))}
            for each in found
        ]
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
