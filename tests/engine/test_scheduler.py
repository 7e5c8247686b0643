"""The scheduler's properties: no page leaked, none shared while it is written to, nobody starves, order kept."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.counting import request
from piecework.engine.pages import PagePool
from piecework.engine.scheduler import Scheduled, Scheduler
from piecework.engine.sequence import Sequence, sequences_of

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=14)
ARRIVAL = st.tuples(PROMPTS, st.integers(1, 10), st.integers(1, 3), st.integers(0, 4))
ARRIVALS = st.lists(ARRIVAL, min_size=1, max_size=9)
SHAPES = st.tuples(st.integers(1, 4), st.integers(7, 14), st.integers(1, 4), st.integers(1, 6), st.booleans())


class Checked:
    """A scheduler stepped by hand: every step is held to what a step must be."""

    def __init__(self, page_size: int, num_pages: int, sequences: int, more_tokens: int, is_sharing: bool) -> None:
        least = 24 // page_size + 1  # the longest sequence fits alone
        self.pool = PagePool(max(num_pages, least), page_size, is_sharing=is_sharing)
        self.budget = sequences + more_tokens
        self.scheduler = Scheduler(self.pool, max_num_sequences=sequences, max_num_batched_tokens=self.budget)
        self.sequences = sequences
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.finished: list[int] = []
        self.started: list[int] = []
        self.steps_of_oldest = 0

    def step(self) -> list[Scheduled]:
        oldest = min((s.order for s in (*self.scheduler.running, *self.scheduler.waiting)), default=None)
        chosen = self.scheduler.schedule()
        self.check(chosen)
        if oldest is not None:
            assert oldest in {each.sequence.order for each in chosen}, "whoever came first gets on in every step"
        self.write(chosen)
        self.scheduler.advance(chosen)
        return chosen

    def check(self, chosen: list[Scheduled]) -> None:
        running = self.scheduler.running
        assert len({each.sequence.order for each in chosen}) == len(chosen)
        assert sum(each.num_tokens for each in chosen) <= self.budget
        assert len(running) <= self.sequences
        assert [s.order for s in running] == sorted(s.order for s in running)
        assert [s.order for s in self.scheduler.waiting] == sorted(s.order for s in self.scheduler.waiting)
        assert not running or not self.scheduler.waiting or running[-1].order < self.scheduler.waiting[0].order
        for each in chosen:
            assert each.num_tokens > 0 and each.sequence in running
            assert len(each.sequence.pages) * self.pool.page_size >= each.end
        held = Counter(page for sequence in running for page in sequence.pages)
        assert self.pool.num_held == len(held)

    def write(self, chosen: list[Scheduled]) -> None:
        """Write each token with all before it to its place, and read back what the sequence would attend to."""
        size = self.pool.page_size
        for each in chosen:
            sequence = each.sequence
            for at in range(each.start, each.end):
                page = sequence.pages[at // size]
                assert self.pool.is_writable(page), "nobody writes to a page that another holds or may come to hold"
                self.content[page, at % size] = tuple(sequence.token_ids[: at + 1])
        for each in chosen:
            for at in range(each.end):
                place = each.sequence.pages[at // size], at % size
                assert self.content[place] == tuple(each.sequence.token_ids[: at + 1])

    def sample(self, chosen: list[Scheduled], left: dict[int, int]) -> None:
        for each in chosen:
            if each.is_sampled:
                sequence = each.sequence
                sequence.append(1 + sum(sequence.token_ids) % 3)
                left[sequence.order] -= 1
                if not left[sequence.order]:
                    self.scheduler.finish(sequence)
                    self.finished.append(sequence.order)


def arrive(checked: Checked, arrivals: list[tuple[list[int], int, int, int]]) -> dict[int, list[Sequence]]:
    """Return who comes before which step."""
    coming: dict[int, list[Sequence]] = {}
    order = step = 0
    for number, (prompt, count, answers, later) in enumerate(arrivals):
        step += later
        made = sequences_of(request(f"r{number}", prompt, max_tokens=count, n=answers, seed=1), order)
        order += len(made)
        coming.setdefault(step, []).extend(made)
    return coming


@settings(max_examples=150, deadline=None)
@given(SHAPES, ARRIVALS, st.data())
def test_whatever_comes_is_answered_and_no_page_is_lost(
    shape: tuple[int, int, int, int, bool], arrivals: list[tuple[list[int], int, int, int]], data: st.DataObject
) -> None:
    checked = Checked(*shape)
    coming = arrive(checked, arrivals)
    everybody = [sequence for sequences in coming.values() for sequence in sequences]
    left = {sequence.order: sequence.parameters.max_tokens for sequence in everybody}
    aborted: set[int] = set()
    for step in range(3000):
        checked.scheduler.add(coming.pop(step, []))
        alive = [*checked.scheduler.running, *checked.scheduler.waiting]
        if not alive and not coming:
            break
        if alive and data.draw(st.integers(0, 9)) == 0:
            gone = data.draw(st.sampled_from(alive))
            checked.scheduler.finish(gone)
            aborted.add(gone.order)
        checked.sample(checked.step(), left)
    assert set(checked.finished) | aborted == set(left)
    assert checked.pool.num_held == 0 and not checked.scheduler.has_work


def test_equal_prompts_that_come_in_order_end_in_order() -> None:
    checked = Checked(2, 8, 3, 4, True)
    coming = arrive(checked, [([1, 2, 3, 1], 6, 1, 0)] * 7)
    checked.scheduler.add(coming.pop(0))
    left = dict.fromkeys(range(7), 6)
    while checked.scheduler.has_work:
        checked.sample(checked.step(), left)
    assert checked.finished == sorted(checked.finished)


def test_several_answers_to_one_prompt_share_its_full_pages() -> None:
    checked = Checked(2, 14, 3, 6, True)
    checked.scheduler.add(sequences_of(request("r", [1, 2, 3, 1, 2, 3, 1], n=3, seed=1), 0))
    left = dict.fromkeys(range(3), 4)
    checked.sample(checked.step(), left)
    checked.sample(checked.step(), left)
    running = checked.scheduler.running
    assert [sequence.pages[:3] for sequence in running] == [running[0].pages[:3]] * 3
    assert [sequence.num_cached for sequence in running] == [0, 6, 6]


def test_pages_that_nobody_holds_are_reused_oldest_first() -> None:
    pool = PagePool(3, 1)
    pages = [pool.take() for _ in range(3)]
    for page, name in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.seal(page, name)
    for page in (pages[1], pages[0], pages[2]):
        pool.release(page)
    assert pool.take() == pages[1] and pool.find(b"b") is None
    assert pool.find(b"a") == pages[0] and pool.find(b"c") == pages[2]
    pool.share(pages[0])
    assert pool.take() == pages[2] and pool.num_free == 0
