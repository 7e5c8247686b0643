"""The engine: a step chooses a batch, runs it, chooses the next tokens, and tells what came.

On a GPU it runs one step ahead: a step is launched while the tokens of the one before it are on their way to the host.
It takes these tokens on the device; the host needs them only to choose its own, and to see what has ended. A sequence
that is found to have ended has a row in the step that was launched already: that row is thrown away.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.engine.answers import Answers
from piecework.engine.batch import Batch, make_batch, padded_sizes
from piecework.engine.generate import allocate_caches
from piecework.engine.grammar import Grammars
from piecework.engine.memory import choose_pages, longest_sequence
from piecework.engine.options import OFF, ON, EngineOptions, Status
from piecework.engine.pages import PagePool
from piecework.engine.sampler import Choosing, start_choosing
from piecework.engine.scheduler import Scheduled, Scheduler
from piecework.engine.sequence import Output, Request, Sequence, sequences_of
from piecework.engine.served import Others, Runner, Served
from piecework.engine.tiers import CAPTURED, Tiers
from piecework.errors import EngineError, OptionError
from piecework.events import ignore
from piecework.ops import PagedCache

REHEARSED_TOKENS = 33


@dataclass(frozen=True)
class Flight:
    """A step whose tokens are on their way: those of `sequences`, in order, and the tier that it ran on."""

    sequences: tuple[Sequence, ...]
    choosing: Choosing
    tier: int


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
        self.answers = Answers(served, self.scheduler)
        self._flight: Flight | None = None
        self.is_ahead = runs_ahead(self.options, served.device, self.others)
        self._aborted: list[Output] = []
        self._order = 0
        self._num_steps = self._num_prompt = self._num_generated = self._num_cached = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return self.scheduler.has_work or bool(self._aborted) or self._flight is not None

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
        self.answers.refuse_second(request)
        sequences = sequences_of(request, self._order)
        self._order += len(sequences)
        schema = request.parameters.json_schema
        for sequence in sequences:
            sequence.constraint = self.grammars.start(schema) if schema else None
            sequence.limit = min(sequence.limit, self.max_length)
        self.answers.open(sequences)
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
            self._aborted.append(self.answers.abort(sequence, self.tiers.used))

    def step(self) -> list[Output]:
        """Run one step; return what came of it, or of the one before where steps run ahead."""
        if self.others is not None:
            self.others.beat()
        outputs, self._aborted = self._aborted, []
        flight, self._flight = self._flight, None
        scheduled = self.scheduler.schedule() if flight is None else self.scheduler.schedule_ahead()
        if scheduled is None:  # there are too few pages: what is on its way may end answers that hold some
            outputs += self._land(flight)
            flight, scheduled = None, self.scheduler.schedule()
        if not scheduled:
            outputs += self._land(flight)
        else:
            batch = self._batch(scheduled, flight.choosing.tokens if flight is not None else None)
            logits = self.runner.run(batch)
            self._count(batch)
            self.scheduler.advance(scheduled)
            outputs += self._land(flight)
            self._flight = self._choose(batch, logits)
        if not self.is_ahead:
            outputs += self._land(self._flight)
            self._flight = None
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

    def _choose(self, batch: Batch, logits: Tensor) -> Flight | None:
        """Have the next tokens chosen; what came before them is known by now."""
        sequences = tuple(each.sequence for each in batch.sampled)
        if all(sequence.is_ended for sequence in sequences):
            return None
        choosing = start_choosing(logits, sequences, self.served.end_of_sequence)
        for row, sequence in enumerate(sequences):
            sequence.pending = row
        return Flight(sequences, choosing, self.tiers.used)

    def _land(self, flight: Flight | None) -> list[Output]:
        """Wait for the tokens of a step, and add each to its answer, if that goes on."""
        if flight is None:
            return []
        outputs = []
        for sequence, chosen in zip(flight.sequences, flight.choosing.read(), strict=True):
            if not sequence.is_ended:
                self.scheduler.seal(sequence)
                outputs.append(self.answers.add(sequence, chosen, flight.tier))
        self._num_generated += len(outputs)
        return outputs

    def _batch(self, scheduled: Iterable[Scheduled], coming: Tensor | None = None) -> Batch:
        served, options = self.served, self.options
        return make_batch(
            tuple(scheduled),
            self.caches,
            options.page_size,
            served.device,
            served.backend,
            self._sizes,
            coming,
        )

    def _rehearse(self, num_tokens: int) -> None:
        """Run a step of tokens that nobody asked for, on pages that nobody holds."""
        count = min(num_tokens, self.max_length, self.options.max_num_batched_tokens)
        needed = self.pool.pages_for(count)
        if needed > self.pool.num_free:
            return
        most = self.served.vocabulary_size or 2
        sequence = Sequence(Request("rehearsal", tuple(7919 * n % most for n in range(count))), 0, -1, 0)
        sequence.pages = array("i", [self.pool.take() for _ in range(needed)])
        scheduled = (Scheduled(sequence, 0, count),)
        self.tiers.run(self._batch(scheduled))
        for page in sequence.pages:
            self.pool.release(page)

    def close(self) -> None:
        """Let go of all requests and of the pages' memory; nothing may be called afterwards."""
        for request_id in self.answers.names:
            self.abort(request_id)
        self._flight = None
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
        for each in batch.scheduled:
            if each.sequence.length == each.sequence.num_prompt:
                self._num_prompt += each.num_tokens
                if each.start == each.sequence.num_cached:
                    self._num_cached += each.start


def runs_ahead(options: EngineOptions, device: str, others: Others | None) -> bool:
    """Tell whether steps run ahead: on a GPU, which would wait for the host. Other ranks are sent known tokens."""
    if options.step_ahead == OFF or others is not None:
        return False
    return options.step_ahead == ON or torch.device(device).type == "cuda"
