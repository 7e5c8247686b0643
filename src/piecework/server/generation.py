"""From what was asked to the engine and back: prompts side by side, their outputs as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from piecework.engine.options import Status
from piecework.engine.sequence import Output, Request, SamplingParameters, TokenLogprobs
from piecework.server.faults import Refusal
from piecework.server.metrics import Metrics
from piecework.server.requests import Sampling
from piecework.server.words import Words


class Service(Protocol):
    """The engine as the front sees it."""

    def generate(self, request: Request) -> AsyncIterator[Output]: ...

    @property
    def status(self) -> Status: ...


@dataclass(frozen=True)
class ServedModel:
    """A model that answers: its engine, its tokenizer, and how long a text may be."""

    service: Service
    words: Words
    max_length: int
    root: str


@dataclass(frozen=True)
class Asked:
    """One request of the client: prompts that are answered side by side, each `n` times."""

    id: str
    prompts: tuple[tuple[int, ...], ...]
    parameters: SamplingParameters

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.parameters.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def parameters_of(body: Sampling, *, max_tokens: int, logprobs: int | None) -> SamplingParameters:
    """Return a body's sampling parameters; OpenAI's defaults stand where it says nothing."""

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return SamplingParameters(
        max_tokens=max_tokens,
        min_tokens=min(given(body.min_tokens, 0), max_tokens),
        temperature=given(body.temperature, 1.0),
        top_k=max(0, given(body.top_k, 0)),
        top_p=given(body.top_p, 1.0),
        min_p=given(body.min_p, 0.0),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        repetition_penalty=given(body.repetition_penalty, 1.0),
        seed=body.seed,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        n=given(body.n, 1),
        json_schema=body.wanted_schema,
    )


def room_for(prompts: Sequence[Sequence[int]], max_tokens: int | None, max_length: int, param: str) -> int:
    """Return how many tokens may be generated; raise Refusal where prompts are empty or too long for the model."""
    for prompt in prompts:
        if not prompt:
            raise Refusal(400, "the prompt has no tokens", hint="give at least one", param=param, code="empty_prompt")
    longest = max(map(len, prompts))
    wanted = 1 if max_tokens is None else max_tokens
    if longest + wanted > max_length:
        raise Refusal(
            400,
            f"the prompt has {longest} tokens, and `max_tokens` asks for {wanted} more: this model's texts end at "
            f"{max_length} tokens",
            hint="shorten the prompt, or lower `max_tokens`",
            param=param if longest >= max_length else "max_tokens",
            code="context_length_exceeded",
        )
    return max_length - longest if max_tokens is None else max_tokens


async def answers(model: ServedModel, asked: Asked, metrics: Metrics) -> AsyncGenerator[tuple[int, Output], None]:
    """Yield each output with the number of the answer that it belongs to, in the order in which they come.

    Closing the generator aborts what is still under way.
    """
    watch = metrics.watch_request(len(asked.prompts), asked.num_prompt_tokens)
    queue: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, prompt: tuple[int, ...]) -> None:
        name = f"{asked.id}-{number}" if len(asked.prompts) > 1 else asked.id
        outputs = model.service.generate(Request(name, prompt, asked.parameters))
        try:
            async with aclosing(outputs):  # type: ignore[type-var]
                async for output in outputs:
                    queue.put_nowait((number, output))
            queue.put_nowait((number, None))
        except Exception as error:  # noqa: BLE001  handed on to whoever waits
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(pump(number, prompt)) for number, prompt in enumerate(asked.prompts)]
    left = len(tasks)
    try:
        while left:
            number, output = await queue.get()
            if output is None:
                left -= 1
            elif isinstance(output, BaseException):
                raise output
            else:
                watch.output(output)
                yield number * asked.parameters.n + output.index, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        watch.end()


@dataclass
class Answer:
    """One answer as it grows."""

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, output: Output) -> None:
        """Take what a step added."""
        self.texts.append(output.text)
        self.num_tokens += len(output.token_ids)
        self.logprobs += output.logprobs or ()
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


async def collect(model: ServedModel, asked: Asked, metrics: Metrics) -> list[Answer]:
    """Return all answers, whole."""
    found = [Answer() for _ in range(asked.num_answers)]
    async with aclosing(answers(model, asked, metrics)) as outputs:
        async for number, output in outputs:
            found[number].add(output)
    return found


def usage_of(asked: Asked, num_completion_tokens: int) -> dict[str, int]:
    """Return the usage of a request."""
    prompt = asked.num_prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_completion_tokens,
        "total_tokens": prompt + num_completion_tokens,
    }
