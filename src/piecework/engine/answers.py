"""The answers under way: each token becomes text, and may end its answer."""

from __future__ import annotations

from piecework.engine.sampler import Chosen
from piecework.engine.scheduler import Scheduler
from piecework.engine.sequence import FinishReason, Output, Request, Sequence
from piecework.engine.served import Served
from piecework.engine.text import TextStream
from piecework.errors import OptionError


class Answers:
    """What is told of each sequence, token by token, until it ends; ending one lets go of its pages."""

    def __init__(self, served: Served, scheduler: Scheduler) -> None:
        self._served = served
        self._scheduler = scheduler
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._open: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The requests that are under way."""
        return tuple(self._open)

    def refuse_second(self, request: Request) -> None:
        """Raise OptionError where a request of that name is under way."""
        if request.id in self._open:
            raise OptionError(f"request `{request.id}` is under way already", hint="give each request an id of its own")

    def open(self, sequences: list[Sequence]) -> None:
        """Take on the answers to one request."""
        for sequence in sequences:
            name, stop = sequence.request.id, sequence.parameters.stop
            self._open[name] = self._open.get(name, 0) + 1
            self._texts[name, sequence.index] = TextStream(self._served.tokenizer, stop)

    def add(self, sequence: Sequence, chosen: Chosen, tier: int) -> Output:
        """Add a token to an answer, and see whether it ends there."""
        sequence.append(chosen.token_id)
        text, finish_reason, stop_reason = self._take(sequence, chosen.token_id)
        if finish_reason is not None:
            self._close(sequence)
        return Output(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=(chosen.token_id,),
            text=text,
            logprobs=None if chosen.logprobs is None else (chosen.logprobs,),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached,
            tier=tier,
        )

    def abort(self, sequence: Sequence, tier: int) -> Output:
        """End an answer as it is."""
        self._close(sequence)
        return Output(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=(),
            text="",
            finish_reason="abort",
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached,
            tier=tier,
        )

    def _take(self, sequence: Sequence, token_id: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Return the text that may go out now, and how and where the answer ends, if it does."""
        parameters, constraint = sequence.parameters, sequence.constraint
        stream = self._texts[sequence.request.id, sequence.index]
        is_end = token_id in self._served.end_of_sequence and not parameters.ignore_eos
        if is_end or token_id in parameters.stop_token_ids:
            return stream.end(), "stop", None if is_end else token_id
        text, stop = stream.add(token_id, may_stop=sequence.num_generated >= parameters.min_tokens)
        if stop is not None:
            return text, "stop", stop
        if constraint is not None and (constraint.is_complete or constraint.fault):
            return text + stream.end(), "abort" if constraint.fault else "stop", None
        if sequence.length >= sequence.limit:
            return text + stream.end(), "length", None
        return text, None, None

    def _close(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        name = sequence.request.id
        del self._texts[name, sequence.index]
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
