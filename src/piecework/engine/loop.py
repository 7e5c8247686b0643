"""The engine: a step chooses a batch, runs it, chooses the next tokens, and tells what came."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from piecework.engine.batch import Batch, make_batch, padded_sizes
from piecework.engine.generate import allocate_caches
from piecework.engine.grammar import Grammars
from piecework.engine.memory import choose_pages, longest_sequence
from piecework.engine.options import EngineOptions, Status
from piecework.engine.pages import PagePool
from piecework.engine.sampler import Chosen, choose
from piecework.engine.scheduler import Scheduled, Scheduler
from piecework.engine.sequence import FinishReason, Output, Request, Sequence, TokenLogprobs, sequences_of
from piecework.engine.served import Others, Runner, Served
from piecework.engine.text import TextStream
from piecework.engine.tiers import CAPTURED, Tiers
from piecework.errors import EngineError, OptionError
from piecework.events import ignore
from piecework.ops import PagedCache

REHEARSED_TOKENS = 33


class Engine:
    """Continuous batching over one model. One thread calls it; `Service` is what gives it a thread of its own.

    `submit` and `abort` take effect in the next `step`, which returns what it added to each answer.
    """

    def __init__(
        self,
        served: Served,
        options: EngineOptions | None = None,
        *,
        tiers: Tiers | None = None,
        others: Others | None = None,
    ) -> None:
        self.served = served
        self.options = options or EngineOptions()
        self.others = others
        self.tiers = tiers or Tiers(served.step, ignore, num_sites=len(served.sites))
        self.runner: Runner = self.tiers  # whoever watches steps stands in its place
        num_pages = self.options.num_pages or choose_pages(served, self.options)
        self.pool = PagePool(num_pages, self.options.page_size, is_sharing=self.options.share_prefixes)
        self.scheduler = Scheduler(
            self.pool,
            max_num_sequences=self.options.max_num_sequences,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
        )
        self.caches: Mapping[str, PagedCache] = allocate_caches(
            served.sites,
            num_pages=num_pages,
            page_size=self.options.page_size,
            dtype=served.dtype,
            device=served.device,
        )
        most, count = self.options.max_num_batched_tokens, self.options.max_num_sequences
        self._sizes = padded_sizes(most, count, served.backend)
        self.tiers.caches = self.caches
        self.max_length = longest_sequence(served, self.options, num_pages)
        self.tiers.most_pages = -(-self.max_length // self.options.page_size)
        self.grammars = Grammars(served.tokenizer, served.vocabulary_size, served.end_of_sequence)
        self._texts: dict[tuple[str, int], TextStream] = {}
        self._open: dict[str, int] = {}
        self._aborted: list[Output] = []
        self._order = 0
        self._num_steps = self._num_prompt = self._num_generated = self._num_cached = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return self.scheduler.has_work or bool(self._aborted)

    @property
    def has_background_work(self) -> bool:
        """Whether `idle` has something to do."""
        return self.tiers.is_climbing

    @property
    def patience_s(self) -> float | None:
        """How long `idle` may be left uncalled while nothing is asked for; None: for ever."""
        return self.others.beat_s if self.others is not None else None

    @property
    def status(self) -> Status:
        """Where the engine stands now."""
        return Status(
            is_ready=True,
            progress=self.tiers.progress,
            tier=self.tiers.best,
            trouble=self.tiers.trouble,
            steps_by_tier=tuple(self.tiers.steps_by_tier),
            tokens_by_tier=tuple(self.tiers.tokens_by_tier),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_pages=self.pool.num_pages,
            num_free_pages=self.pool.num_free,
            num_preempted=self.scheduler.num_preempted,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt,
            num_generated_tokens=self._num_generated,
            num_cached_tokens=self._num_cached,
        )

    def submit(self, request: Request) -> None:
        """Put a request in the line. Raises OptionError where it can never be answered."""
        self.check(request)
        if request.id in self._open:
            raise OptionError(f"request `{request.id}` is under way already", hint="give each request an id of its own")
        sequences = sequences_of(request, self._order)
        self._order += len(sequences)
        self._open[request.id] = len(sequences)
        schema = request.parameters.json_schema
        for sequence in sequences:
            sequence.constraint = self.grammars.start(schema) if schema else None
            self._texts[request.id, sequence.index] = TextStream(self.served.tokenizer, request.parameters.stop)
        self.scheduler.add(sequences)

    def check(self, request: Request) -> None:
        """Raise OptionError where a request can never be answered; may be called by any thread."""
        length = len(request.prompt_ids)
        if length >= self.max_length:
            raise OptionError(
                f"the prompt has {length} tokens, and a prompt with its answer may have {self.max_length}",
                hint="shorten the prompt",
                facts={"num_prompt_tokens": length, "max_length": self.max_length},
            )
        size = self.served.vocabulary_size
        wrong = next((t for t in request.prompt_ids if not isinstance(t, int) or t < 0 or (size and t >= size)), None)
        if wrong is not None:
            raise OptionError(
                f"token id `{wrong}` is not in the model's vocabulary",
                hint=f"ids run from 0 to {size - 1}" if size else "ids are not negative",
                facts={"token_id": wrong},
            )
        if request.parameters.stop and self.served.tokenizer is None:
            raise OptionError("`stop` strings need a tokenizer, and the folder has none", hint="use `stop_token_ids`")
        if request.parameters.json_schema:
            self.grammars.start(request.parameters.json_schema)

    def abort(self, request_id: str) -> None:
        """End a request now and free what it holds; one that has ended already is left alone."""
        for sequence in self.scheduler.find(request_id):
            self._aborted.append(self._finish(sequence, (), "", "abort"))

    def step(self) -> list[Output]:
        """Run one step; return what it added to each answer that got on."""
        if self.others is not None:
            self.others.beat()
        outputs, self._aborted = self._aborted, []
        scheduled = self.scheduler.schedule()
        if scheduled:
            outputs += self._run(scheduled)
        self.tiers.between(is_idle=False)
        return outputs

    def idle(self) -> None:
        """Do a slice of what makes the next steps faster, while there is nothing else to do."""
        if self.others is not None:
            self.others.beat()
        if self.tiers.wants_steps:
            self._rehearse(REHEARSED_TOKENS)
        self.tiers.between(is_idle=True)

    def wait_for(self, tier: int) -> None:
        """Climb to a tier before anything is answered. Raises EngineError where that cannot be reached."""
        while self.tiers.is_climbing and (self.tiers.best < tier or tier == CAPTURED):
            self.idle()
            time.sleep(0.0 if self.tiers.wants_steps else 0.005)
        if self.tiers.trouble:
            raise EngineError(f"what was to be waited for is not there: {self.tiers.trouble}", hint="serve without it")

    def _run(self, scheduled: list[Scheduled]) -> list[Output]:
        batch = self._batch(scheduled)
        logits = self.runner.run(batch)
        self._count(batch)
        self.scheduler.advance(scheduled)
        sampled = [each.sequence for each in batch.sampled]
        if not sampled:
            return []
        chosen = choose(logits, sampled, self.served.end_of_sequence)
        return [self._add(sequence, token) for sequence, token in zip(sampled, chosen, strict=True)]

    def _batch(self, scheduled: Iterable[Scheduled]) -> Batch:
        served, options = self.served, self.options
        return make_batch(
            tuple(scheduled),
            self.caches,
            options.page_size,
            served.device,
            served.backend,
            self._sizes,
        )

    def _rehearse(self, num_tokens: int) -> None:
        """Run a step of tokens that nobody asked for, on pages that nobody holds."""
        count = min(num_tokens, self.max_length, self.options.max_num_batched_tokens)
        needed = self.pool.pages_for(count)
        if needed > self.pool.num_free:
            return
        most = self.served.vocabulary_size or 2
        sequence = Sequence(Request("rehearsal", tuple(7919 * n % most for n in range(count))), 0, -1, 0)
        sequence.pages = [self.pool.take() for _ in range(needed)]
        scheduled = (Scheduled(sequence, 0, count),)
        self.tiers.run(self._batch(scheduled))
        for page in sequence.pages:
            self.pool.release(page)

    def close(self) -> None:
        """Let go of all requests and of the pages' memory; nothing may be called afterwards."""
        for request_id in list(self._open):
            self.abort(request_id)
        self.tiers.close()
        self.caches = {}
        if self.others is not None:
            self.others.close()

    def fail(self, error: Exception) -> None:
        """Let the other ranks know that this one has failed; nothing may be called afterwards."""
        if self.others is not None:
            self.others.close(error)

    def _count(self, batch: Batch) -> None:
        self._num_steps += 1
        self._num_generated += len(batch.sampled)
        for each in batch.scheduled:
            if not each.sequence.num_generated:
                self._num_prompt += each.num_tokens
                if each.start == each.sequence.num_cached:
                    self._num_cached += each.start

    def _add(self, sequence: Sequence, chosen: Chosen) -> Output:
        """Add a token to an answer, and see whether it ends there."""
        parameters = sequence.parameters
        sequence.append(chosen.token_id)
        stream = self._texts[sequence.request.id, sequence.index]
        logprobs = None if chosen.logprobs is None else (chosen.logprobs,)
        is_long_enough = sequence.num_generated >= parameters.min_tokens
        is_end = chosen.token_id in self.served.end_of_sequence and not parameters.ignore_eos
        if is_end or chosen.token_id in parameters.stop_token_ids:
            reason = None if is_end else chosen.token_id
            return self._finish(sequence, (chosen.token_id,), stream.end(), "stop", reason, logprobs)
        text, stop = stream.add(chosen.token_id, may_stop=is_long_enough)
        if stop is not None:
            return self._finish(sequence, (chosen.token_id,), text, "stop", stop, logprobs)
        constraint = sequence.constraint
        if constraint is not None and (constraint.is_complete or constraint.fault):
            ended: FinishReason = "abort" if constraint.fault else "stop"
            return self._finish(sequence, (chosen.token_id,), text + stream.end(), ended, None, logprobs)
        if sequence.num_generated >= parameters.max_tokens or len(sequence.token_ids) >= self.max_length:
            return self._finish(sequence, (chosen.token_id,), text + stream.end(), "length", None, logprobs)
        return self._output(sequence, (chosen.token_id,), text, logprobs=logprobs)

    def _finish(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        finish_reason: FinishReason,
        stop_reason: str | int | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> Output:
        self.scheduler.finish(sequence)
        name = sequence.request.id
        del self._texts[name, sequence.index]
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
        return self._output(sequence, token_ids, text, finish_reason, stop_reason, logprobs)

    def _output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        text: str,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> Output:
        return Output(
            request_id=sequence.request.id,
            index=sequence.index,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached,
            tier=self.tiers.used,
        )
