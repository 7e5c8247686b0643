"""`/v1/chat/completions`: messages in, the assistant's message out."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from piecework.engine.sequence import Output, TokenLogprobs
from piecework.server.answers import ChatCompletion
from piecework.server.bodies import Json
from piecework.server.events import EventStream, guarded, unless_gone
from piecework.server.faults import Refusal
from piecework.server.front import REFUSALS, Front
from piecework.server.generation import Asked, ServedModel, collect, parameters_of, room_for, usage_of
from piecework.server.requests import ChatBody, Message
from piecework.server.streaming import Growth, stream
from piecework.server.words import Words

RENDERED_BY_OURS = ("messages", "add_generation_prompt", "tools", "documents")
_TEMPLATE_TIMEOUT_S = 10.0


def make_router(front: Front) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=REFUSALS)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Continue a conversation; with `stream`, piece by piece as server-sent events."""
        front.check_model(body.model)
        model = front.model
        asked = await _read(front, model, body)
        form = _ChatForm(front.names[0], model.words, body, asked)
        place = front.gate.admit(asked.num_answers)
        if body.stream:
            chunks = stream(model, asked, form, body.stream_options, front.metrics)
            return EventStream(guarded(chunks), front.headers(body), place.leave)
        with place:
            found = await unless_gone(request, collect(model, asked, front.metrics))
        choices = [
            {
                "index": number,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": form.logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for number, answer in enumerate(found)
        ]
        usage = usage_of(asked, sum(answer.num_tokens for answer in found))
        whole = {**form.head, "object": "chat.completion", "choices": choices, "usage": usage}
        return Json(whole, headers=front.headers(body))

    return router


async def render(front: Front, messages: Sequence[Message], add_generation_prompt: bool, more: dict[str, Any]) -> str:
    """Return the prompt of a conversation, by the model's template."""
    template = front.template
    if template is None:
        raise Refusal(
            400,
            "the model has no chat template, so that messages cannot be turned into a prompt",
            hint="use `/v1/completions`, or start the server with `--chat-template FILE`",
            param="messages",
            code="no_chat_template",
        )
    clash = next((name for name in more if name in RENDERED_BY_OURS), None)
    if clash is not None:
        raise Refusal(
            400,
            f"`chat_template_kwargs.{clash}` is set by the server",
            hint="leave it out",
            param="chat_template_kwargs",
        )
    given = [message.as_dict() for message in messages]
    # The template came with the weights: one that takes long keeps a thread busy, and not the event loop.
    rendering = asyncio.to_thread(
        lambda: template.render(given, add_generation_prompt=add_generation_prompt, **more)
    )
    try:
        return await asyncio.wait_for(rendering, _TEMPLATE_TIMEOUT_S)
    except TimeoutError:
        raise Refusal(
            400,
            f"the chat template took longer than {_TEMPLATE_TIMEOUT_S:g} seconds for these messages",
            hint="send fewer messages, or mend the template",
            param="messages",
            code="chat_template",
        ) from None


async def _read(front: Front, model: ServedModel, body: ChatBody) -> Asked:
    """Return what a body asks for, its conversation as token ids."""
    if (body.n or 1) > front.options.max_choices:
        raise Refusal(
            400,
            f"`n={body.n}` is more than {front.options.max_choices} answers",
            hint="lower it; the server's `--max-choices` is the limit",
            param="n",
            code="too_many_answers",
        )
    prompt = await render(front, body.messages, body.add_generation_prompt, body.chat_template_kwargs or {})
    # The template writes the special tokens itself.
    ids = await model.words.encode(prompt, add_special_tokens=False)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = room_for([ids], wanted, model.max_length, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    parameters = parameters_of(body, max_tokens=max_tokens, logprobs=logprobs)
    return Asked(f"chatcmpl-{uuid.uuid4().hex}", (tuple(ids),), parameters)


class _ChatForm:
    """Puts answers into the form of `/v1/chat/completions`."""

    def __init__(self, model_name: str, words: Words, body: ChatBody, asked: Asked) -> None:
        self.head = {"id": asked.id, "created": int(time.time()), "model": model_name}
        self._words = words
        self._asks_logprobs = bool(body.logprobs)

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk with these choices."""
        return {**self.head, "object": "chat.completion.chunk", "choices": choices}

    def opening(self, number: int) -> dict[str, Any] | None:
        """Return whose message it is."""
        delta = {"role": "assistant", "content": ""}
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, number: int, output: Output, growth: Growth) -> dict[str, Any]:
        """Return what a step added."""
        return {
            "index": number,
            "delta": {"content": output.text} if output.text or not output.finish_reason else {},
            "logprobs": self.logprobs(output.logprobs or ()),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Return log-probabilities, where they are asked for."""
        if not self._asks_logprobs:
            return None
        content = [
            self._token(each.token_id, each.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in each.top]}
            for each in found
        ]
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._words.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
