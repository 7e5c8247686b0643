"""Attention and the KV write over random ragged, paged layouts, against a dense float64 computation of its own."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piecework.errors import StepError
from piecework.ops import PagedCache, Step, attention, kv_update, step_context

SITE = "layers.0"


def dense(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend the last rows of one sequence over all of it, head by head, in float64."""
    rows, heads, _ = query.shape
    length, kv_heads, _ = key.shape
    out = torch.zeros(rows, heads, value.shape[2], dtype=torch.float64)
    for row in range(rows):
        position = length - rows + row
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            of_head = head // (heads // kv_heads)
            scores = (key[first : position + 1, of_head].double() @ query[row, head].double()) * scaling
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double()[None]))
            weights = torch.softmax(scores, 0)[: position + 1 - first]
            out[row, head] = weights @ value[first : position + 1, of_head].double()
    return out


class Traffic:
    """Sequences that grow step by step over scattered pages, with all they were given kept aside."""

    def __init__(self, rng: random.Random, *, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> None:
        self.rng = rng
        self.page_size = page_size
        self.shape = (kv_heads, head_dim)
        self.dtype = dtype
        self.cache = PagedCache.allocate(96, page_size, kv_heads, head_dim, dtype=dtype)
        self.free = list(range(96))
        if rng.random() < 0.7:
            rng.shuffle(self.free)
        self.pages: list[list[int]] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def add(self) -> None:
        self.pages.append([])
        self.keys.append(torch.zeros(0, *self.shape, dtype=self.dtype))
        self.values.append(torch.zeros(0, *self.shape, dtype=self.dtype))

    def step(self, rows: list[int], padding: int) -> tuple[Step, Tensor, Tensor]:
        slots, starts, new_keys, new_values = [], [0], [], []
        for b, count in enumerate(rows):
            key, value = torch.randn(2, count, *self.shape).to(self.dtype)
            start = len(self.keys[b])
            self.keys[b] = torch.cat((self.keys[b], key))
            self.values[b] = torch.cat((self.values[b], value))
            while len(self.pages[b]) * self.page_size < len(self.keys[b]):
                self.pages[b].append(self.free.pop(0))
            for position in range(start, start + count):
                slots.append(self.pages[b][position // self.page_size] * self.page_size + position % self.page_size)
            starts.append(starts[-1] + count)
            new_keys.append(key)
            new_values.append(value)
        step = Step.from_lists(
            slots=slots,
            query_starts=starts,
            sequence_lengths=[len(keys) for keys in self.keys],
            page_table=self.pages,
            sites={SITE: self.cache},
            num_padded=len(slots) + padding,
        )
        poison = torch.full((padding, *self.shape), float("nan"), dtype=self.dtype)
        return step, torch.cat((*new_keys, poison)), torch.cat((*new_values, poison))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (4, 4), (8, 1)]),
    page_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([0, 0, 1, 4, 7]),
    softcap=st.sampled_from([0.0, 0.0, 2.5]),
    has_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_random_layouts(
    seed: int,
    heads: tuple[int, int],
    page_size: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    query_heads, kv_heads = heads
    head_dim, scaling = 8, 0.4
    traffic = Traffic(rng, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)
    sinks = torch.randn(query_heads).to(dtype) if has_sinks else None
    for _ in range(4):
        if len(traffic.pages) < 3:
            traffic.add()
        # A prompt, a chunk of one, one token of decoding, or a sequence that sits a step out.
        rows = [rng.choice([0, 1, 1, 2, 5]) if len(keys) else rng.randint(1, 9) for keys in traffic.keys]
        padding = rng.choice([0, 1, 5])
        step, key, value = traffic.step(rows, padding)
        total = sum(rows)
        query = torch.randn(total + padding, query_heads, head_dim).to(dtype)
        out = torch.full_like(query, float("nan"))
        with step_context(step):
            token = kv_update(key, value, SITE)
            attention(query, token, out, scaling, window, softcap, sinks, SITE)
        assert token.shape == (0,)
        first = 0
        for b, count in enumerate(rows):
            if count:
                expected = dense(
                    query[first : first + count], traffic.keys[b], traffic.values[b], scaling, window, softcap, sinks
                )
                tolerance = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}[dtype]
                torch.testing.assert_close(
                    out[first : first + count].double(), expected, atol=tolerance, rtol=tolerance
                )
            first += count
        assert not traffic.cache.pages.isnan().any(), "padding reached the cache"


def test_padding_in_the_middle_is_not_written() -> None:
    cache = PagedCache.allocate(1, 8, 1, 4, dtype=torch.float32)
    step = Step.from_lists(
        slots=[2, -1, 5], query_starts=[0, 3], sequence_lengths=[6], page_table=[[0]], sites={SITE: cache}
    )
    rows = torch.arange(1.0, 4.0)[:, None, None].expand(3, 1, 4)
    with step_context(step):
        kv_update(rows, rows * 10, SITE)
    assert cache.pages[0, 0, :, 0, 0].tolist() == [0, 0, 1, 0, 0, 3, 0, 0]
    assert cache.pages[1, 0, :, 0, 0].tolist() == [0, 0, 10, 0, 0, 30, 0, 0]


def test_a_long_prompt_goes_in_blocks() -> None:
    """Rows are attended in blocks of bounded size, and give the same as one token at a time."""
    torch.manual_seed(0)
    length, window = 1500, 700
    query, key, value = torch.randn(3, length, 2, 8)
    cache = PagedCache.allocate(1, length, 2, 8, dtype=torch.float32)
    whole = Step.from_lists(
        slots=list(range(length)),
        query_starts=[0, length],
        sequence_lengths=[length],
        page_table=[[0]],
        sites={SITE: cache},
    )
    for softcap in (0.0, 3.0):
        out = torch.empty_like(query)
        with step_context(whole):
            attention(query, kv_update(key, value, SITE), out, 0.5, window, softcap, None, SITE)
        for row in (0, 1, window - 1, window, 1023, 1024, 1499):
            one = Step.from_lists(
                slots=[row], query_starts=[0, 1], sequence_lengths=[row + 1], page_table=[[0]], sites={SITE: cache}
            )
            single = torch.empty_like(query[:1])
            with step_context(one):
                attention(query[row : row + 1], key.new_empty(0), single, 0.5, window, softcap, None, SITE)
            torch.testing.assert_close(out[row], single[0], atol=2e-6, rtol=2e-5)


def test_a_bare_tensor_serves_as_a_cache() -> None:
    pages = torch.zeros(2, 2, 4, 1, 4)
    step = Step.from_lists(slots=[4], query_starts=[0, 1], sequence_lengths=[1], page_table=[[1]], sites={SITE: pages})
    row = torch.ones(1, 1, 4)
    out = torch.empty(1, 2, 4)
    with step_context(step):
        attention(torch.ones(1, 2, 4), kv_update(row, row * 2, SITE), out, 1.0, 0, 0.0, None, SITE)
    assert pages[1, 1, 0, 0].tolist() == [2, 2, 2, 2]
    assert out.unique().tolist() == [2]


def one_row(**changed: object) -> Step:
    values: dict[str, object] = {
        "slots": [0],
        "query_starts": [0, 1],
        "sequence_lengths": [1],
        "page_table": [[0]],
        "sites": {SITE: PagedCache.allocate(1, 4, 2, 8, dtype=torch.float32)},
    }
    return Step.from_lists(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"query_starts": [0, 2]}, "a step of 1 tokens has query starts up to 2 and 1 slots"),
        ({"query_starts": [0, 1, 1]}, "a step of 1 sequences has 3 query starts"),
        ({"sequence_lengths": [0]}, "sequence 0 brings 1 rows to a length of 0"),
        ({"sequence_lengths": [9]}, "sequence 0 has 9 tokens and 1 pages of 4"),
        ({"sites": {}}, "at site `layers.0`, for which this step holds no state"),
        ({"sites": {SITE: "x"}}, "whose state is a `str` and no paged cache"),
        ({"sites": {SITE: torch.zeros(2, 1, 4, 2, 16)}}, r"got keys \[1, 2, 8\] `torch.float32`"),
        ({"sites": {SITE: torch.zeros(2, 1, 4, 2, 8).bfloat16()}}, "for pages of .* `torch.bfloat16`"),
    ],
)
def test_a_step_that_does_not_fit(changed: dict[str, object], text: str) -> None:
    rows = torch.zeros(1, 2, 8)
    with pytest.raises(StepError, match=text), step_context(one_row(**changed)):
        kv_update(rows, rows, SITE)


def test_query_heads_must_fit_the_pages() -> None:
    with pytest.raises(StepError, match=r"got queries \[1, 3, 8\]"), step_context(one_row()):
        attention(torch.zeros(1, 3, 8), torch.zeros(0), torch.zeros(1, 3, 8), 1.0, 0, 0.0, None, SITE)
