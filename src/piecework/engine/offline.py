"""Requests that are all there from the start, answered together: no server, no thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecework.engine.loop import Engine
from piecework.engine.sequence import FinishReason, Output, Request, TokenLogprobs


@dataclass(frozen=True)
class Answer:
    """One answer to one prompt; a request for several has as many, told apart by `index`."""

    prompt_ids: tuple[int, ...]
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0


@dataclass
class _Parts:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def answer_all(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Answer all requests; return their answers in order. Raises OptionError before anything is run."""
    for request in requests:
        engine.check(request)
    parts = {(request.id, index): _Parts() for request in requests for index in range(request.parameters.n)}
    ends: dict[tuple[str, int], Output] = {}
    for request in requests:
        engine.submit(request)
    while len(ends) < len(parts):
        for output in engine.step():
            place = output.request_id, output.index
            parts[place].token_ids += output.token_ids
            parts[place].text.append(output.text)
            parts[place].logprobs += output.logprobs or ()
            if output.finish_reason is not None:
                ends[place] = output
    return [
        _join(request, parts[request.id, index], ends[request.id, index])
        for request in requests
        for index in range(request.parameters.n)
    ]


def answer_from(data: Mapping[str, Any]) -> Answer:
    """Make an answer of plain data, as JSON brings it."""
    lists = {name: tuple(data[name]) for name in ("prompt_ids", "token_ids")}
    logprobs = data["logprobs"]
    if logprobs is not None:
        logprobs = tuple(TokenLogprobs(**{**one, "top": tuple(map(tuple, one["top"]))}) for one in logprobs)
    return Answer(**{**data, **lists, "logprobs": logprobs})


def _join(request: Request, parts: _Parts, end: Output) -> Answer:
    assert end.finish_reason is not None
    return Answer(
        prompt_ids=request.prompt_ids,
        index=end.index,
        text="".join(parts.text),
        token_ids=tuple(parts.token_ids),
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        logprobs=tuple(parts.logprobs) if request.parameters.logprobs is not None else None,
        num_cached_tokens=end.num_cached_tokens,
    )
