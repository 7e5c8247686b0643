"""Which sequences run in the next step, and with how many tokens each; torch-free.

First come, first served. A step takes one token of every sequence that is being decoded, then as much of the prompts as
the budget allows, oldest first. Where pages run out, the youngest sequence gives its own back and waits again at the
head of the line; the oldest never does, so that it always ends.

A step may be chosen ahead, before the tokens of the last one are known: each sequence then has one token more that is
pending, and none is sent back for want of pages, since what is on its way may end answers and free some.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from piecework.engine.pages import PagePool
from piecework.engine.sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """A sequence and how many of its tokens run in a step; the first of them is at position `start`.

    `is_sampled` says that they end with the last that there was when it was scheduled: the next one can be chosen.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampled: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_sampled", self.end == self.sequence.length)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Scheduler:
    """The line of those who wait, and those who run, both oldest first."""

    def __init__(self, pool: PagePool, *, max_num_sequences: int, max_num_batched_tokens: int) -> None:
        assert 0 < max_num_sequences < max_num_batched_tokens, "a prompt gets on beside a full batch of decoding"
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self._max_num_sequences = max_num_sequences
        self._max_num_batched_tokens = max_num_batched_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences at the end of the line."""
        self.waiting.extend(sequences)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step, and give each of its sequences the pages that its tokens go to."""
        chosen = self._choose(may_preempt=True)
        assert chosen is not None
        return chosen

    def schedule_ahead(self) -> list[Scheduled] | None:
        """Choose the next step while tokens are pending; None where one that runs would have to give pages back."""
        return self._choose(may_preempt=False)

    def advance(self, scheduled: Iterable[Scheduled]) -> None:
        """Note that a step is under way: what is scheduled next comes after it, and may share pages that it fills."""
        for each in scheduled:
            each.sequence.num_computed = each.end
            self.seal(each.sequence)

    def seal(self, sequence: Sequence) -> None:
        """Let pages be shared that are full of computed tokens, as far as these are known."""
        size = self.pool.page_size
        full = min(sequence.num_computed, len(sequence.token_ids)) // size
        for page in range(sequence.num_sealed, full):
            self.pool.seal(sequence.pages[page], sequence.digest_of(page, size))
        sequence.num_sealed = max(sequence.num_sealed, full)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, and let go of its pages.

        A step under way may still write behind its tokens: to places that are read by nobody before the next owner,
        whose steps come later, has written there.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.is_ended = True
        self._release(sequence)

    def find(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request that have not ended."""
        return [each for each in (*self.running, *self.waiting) if each.request.id == request_id]

    def _choose(self, *, may_preempt: bool) -> list[Scheduled] | None:
        chosen: dict[int, Scheduled] = {}
        budget = self._max_num_batched_tokens
        sent_back: set[int] = set()
        going_on = [each for each in self.running if each.length < each.limit]
        decoding = [each for each in going_on if each.num_remaining == 1]
        filling = [each for each in going_on if each.num_remaining != 1]
        for sequence in (*decoding, *filling):
            count = min(sequence.num_remaining, budget)
            if not count or sequence.order in sent_back:
                continue
            while sequence.order not in sent_back and not self._grow(sequence, sequence.num_computed + count):
                if not may_preempt:
                    return None
                victim = self._preempt()
                budget += chosen.pop(victim.order).num_tokens if victim.order in chosen else 0
                sent_back.add(victim.order)
            if sequence.order not in sent_back:
                chosen[sequence.order] = Scheduled(sequence, sequence.num_computed, count)
                budget -= count
        while budget and not sent_back and (admitted := self._admit()) is not None:
            count = min(admitted.num_remaining, budget)
            grown = self._grow(admitted, admitted.num_computed + count)
            assert grown, "whoever is admitted has pages for its tokens"
            chosen[admitted.order] = Scheduled(admitted, admitted.num_computed, count)
            budget -= count
        return list(chosen.values())

    def _admit(self) -> Sequence | None:
        """Let the first in the line run if there is a place, and pages for all its tokens."""
        if not self.waiting or len(self.running) >= self._max_num_sequences:
            return None
        sequence = self.waiting[0]
        size = self.pool.page_size
        whole = (sequence.num_prompt - 1) // size * size
        if sequence.index and any(e.request is sequence.request and e.num_computed < whole for e in self.running):
            return None  # a first answer whose prompt is half-way will leave pages to share
        shared = self._shared_pages(sequence)
        free = self.pool.num_free - sum(self.pool.is_free(page) for page in shared)
        if self.pool.pages_for(len(sequence.token_ids)) - len(shared) > free:
            return None
        self.waiting.popleft()
        for page in shared:
            self.pool.share(page)
        sequence.pages = array("i", shared)
        sequence.num_sealed = len(shared)
        sequence.num_computed = len(shared) * self.pool.page_size
        if not sequence.num_generated:
            sequence.num_cached = sequence.num_computed
        self.running.append(sequence)
        return sequence

    def _shared_pages(self, sequence: Sequence) -> list[int]:
        """Return the sealed pages of a sequence's beginning; one token at least is left to compute."""
        size, found = self.pool.page_size, []
        for number in range((len(sequence.token_ids) - 1) // size):
            page = self.pool.find(sequence.digest_of(number, size))
            if page is None:
                break
            found.append(page)
        return found

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence pages for so many tokens; False, and nothing changed, where there are not enough."""
        missing = self.pool.pages_for(num_tokens) - len(sequence.pages)
        if missing > self.pool.num_free:
            return False
        sequence.pages.extend(self.pool.take() for _ in range(missing))
        return True

    def _preempt(self) -> Sequence:
        """Send the youngest that runs back to the head of the line; its tokens are computed again later."""
        victim = self.running.pop()
        assert self.running or self.pool.num_held, "a sequence alone always has the pages it needs"
        self._release(victim)
        self.waiting.appendleft(victim)
        self.num_preempted += 1
        return victim

    def _release(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):
            self.pool.release(page)
        sequence.pages = array("i")
        sequence.num_computed = sequence.num_sealed = 0
