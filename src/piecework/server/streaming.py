"""One way to stream for both endpoints; each gives its own form to the chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from piecework.engine.sequence import Output
from piecework.server.events import event
from piecework.server.generation import Asked, ServedModel, answers, usage_of
from piecework.server.metrics import Metrics
from piecework.server.requests import StreamOptions


@dataclass
class Growth:
    """How far one answer of a stream is."""

    num_tokens: int = 0
    num_characters: int = 0


class Form(Protocol):
    """The form of an endpoint's chunks."""

    def opening(self, number: int) -> dict[str, Any] | None:
        """Return the choice that is sent before an answer's first token."""

    def delta(self, number: int, output: Output, growth: Growth) -> dict[str, Any]:
        """Return the choice that tells what a step added; `growth` is how far the answer was before."""

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk with these choices."""


async def stream(
    model: ServedModel, asked: Asked, form: Form, options: StreamOptions | None, metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of all answers as they come, and the usage at the end where that was asked for."""
    told = options or StreamOptions()
    state = [Growth() for _ in range(asked.num_answers)]
    opened: set[int] = set()

    def usage() -> dict[str, int]:
        return usage_of(asked, sum(growth.num_tokens for growth in state))

    def written(choice: dict[str, Any]) -> bytes:
        chunk = form.chunk([choice])
        if told.continuous_usage_stats:
            chunk["usage"] = usage()
        elif told.include_usage:
            chunk["usage"] = None
        return event(chunk)

    async with aclosing(answers(model, asked, metrics)) as outputs:
        async for number, output in outputs:
            if number not in opened:
                opened.add(number)
                first = form.opening(number)
                if first is not None:
                    yield written(first)
            growth = state[number]
            choice = form.delta(number, output, growth)
            growth.num_tokens += len(output.token_ids)
            growth.num_characters += len(output.text)
            if output.text or output.logprobs or output.finish_reason:
                yield written(choice)
    if told.include_usage:
        yield event(form.chunk([]) | {"usage": usage()})
