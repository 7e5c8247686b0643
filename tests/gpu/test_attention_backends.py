"""Attention backends on a GPU agree with the reference on random layouts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from piecework.ops import PagedCache, ReferenceAttention
from piecework.ops.layout import DeviceLayout, Layout, lay_out
from piecework.ops.reference import AttentionRule
from piecework.seam.launch import quick_launch

pytest.importorskip("triton")
from piecework.ops.triton_attention import TritonAttention

pytestmark = pytest.mark.gpu


def backend(name: str) -> Any:
    if name == "varlen":
        try:
            from piecework.ops.varlen import VarlenAttention
        except ImportError:
            pytest.skip("this release has no varlen attention over block tables")
        return VarlenAttention()
    if name == "flashinfer":
        pytest.importorskip("flashinfer", reason="the package is not here")
        from piecework.ops.flashinfer_attention import FlashInferAttention

        return FlashInferAttention()
    return TritonAttention(quick_launch) if name == "quick" else TritonAttention()


def random_layout(rng: random.Random, page_size: int, num_pages: int, *, is_decode: bool) -> Layout:
    """Lay out some sequences over scattered pages, with a few rows of padding."""
    free = list(range(num_pages))
    rng.shuffle(free)
    starts, lengths, table, slots = [0], [], [], []
    for _ in range(rng.randint(1, 6)):
        rows = 1 if is_decode else rng.randint(1, 90)
        length = rows + rng.randint(0, 300)
        pages = [free.pop() for _ in range(-(-length // page_size))]
        slots += [pages[at // page_size] * page_size + at % page_size for at in range(length - rows, length)]
        starts.append(starts[-1] + rows)
        lengths.append(length)
        table.append(pages)
    width = max(map(len, table))
    return lay_out(
        slots=[*slots, -1, -1],
        query_starts=starts,
        sequence_lengths=lengths,
        page_table=[[*pages, *[0] * (width - len(pages))] for pages in table],
        num_tokens=len(slots),
        page_size=page_size,
        device=torch.device("cuda"),
    )


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "rule",
    [{}, {"sliding_window": 40}, {"softcap": 20.0}, {"sinks": True}],
    ids=["plain", "window", "cap", "sinks"],
)
@pytest.mark.parametrize("name", ["varlen", "triton", "quick", "flashinfer"])
@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_the_reference(name: str, rule: dict[str, Any], is_decode: bool, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    page_size = 256 if name == "varlen" else rng.choice([8, 16, 32])
    kv_heads, group, width = rng.choice([1, 2, 4]), rng.choice([1, 3, 4]), rng.choice([64, 128])
    layout = random_layout(rng, page_size, 6 * (400 // page_size + 2), is_decode=is_decode)
    cache = PagedCache.allocate(
        6 * (400 // page_size + 2), page_size, kv_heads, width, dtype=torch.bfloat16, device="cuda"
    )
    cache.pages.normal_()
    rows = layout.num_tokens + 2
    query = torch.randn(rows, kv_heads * group, width, dtype=torch.bfloat16, device="cuda")
    sinks = torch.randn(kv_heads * group, dtype=torch.bfloat16, device="cuda") if rule.get("sinks") else None
    asked = AttentionRule(width**-0.5, rule.get("sliding_window", 0), rule.get("softcap", 0.0), sinks)
    found, expected = torch.empty_like(query), torch.empty_like(query)
    backend(name).attend(query, found, cache, layout, asked)
    ReferenceAttention().attend(query, expected, cache, layout, asked)
    assert torch.equal(found[-2:], torch.zeros_like(found[-2:]))
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 4 * 2.0**-7


def fill(held: DeviceLayout, rng: random.Random, count: int) -> Layout:
    """Put some sequences of one row each where a graph reads them; return the same as a layout of the host."""
    free, rows = list(range(1200)), held.slots.shape[0]
    rng.shuffle(free)
    lengths = [rng.randint(1, 600) for _ in range(count)]
    table = [[free.pop() for _ in range(-(-length // held.page_size))] for length in lengths]
    slots = [
        pages[(length - 1) // held.page_size] * held.page_size + (length - 1) % held.page_size
        for pages, length in zip(table, lengths, strict=True)
    ]
    held.slots.fill_(-1)
    held.slots[:count] = torch.tensor(slots, dtype=torch.int32)
    held.sequence_lengths.zero_()
    held.sequence_lengths[:count] = torch.tensor(lengths, dtype=torch.int32)
    for row, pages in enumerate(table):
        held.page_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return lay_out(
        slots=[*slots, *[-1] * (rows - count)], query_starts=list(range(count + 1)), sequence_lengths=lengths,
        page_table=table, num_tokens=count, page_size=held.page_size, device=torch.device("cuda"),
    )  # fmt: skip


@pytest.mark.parametrize("rule", [{}, {"sliding_window": 40}, {"sinks": True}], ids=["plain", "window", "sinks"])
@pytest.mark.parametrize("seed", range(4))
def test_a_graph_reads_another_steps_numbers(rule: dict[str, Any], seed: int) -> None:
    """Recorded under lengths of zero, replayed under real ones: the layout stays on the device."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    page_size, kv_heads, group, width, rows = 16, rng.choice([1, 4]), rng.choice([1, 4]), 64, rng.choice([3, 40])
    cache = PagedCache.allocate(1200, page_size, kv_heads, width, dtype=torch.bfloat16, device="cuda")
    cache.pages.normal_()
    expected_cache = PagedCache(cache.pages.clone())
    shape = (rows, kv_heads, width)
    query = torch.randn(rows, kv_heads * group, width, dtype=torch.bfloat16, device="cuda")
    # Rows of a wider product, as models cut them.
    both = torch.randn(rows, 2 * kv_heads * width, dtype=torch.bfloat16, device="cuda")
    key, value = (part.view(shape) for part in both.chunk(2, dim=1))
    asked = AttentionRule(
        width**-0.5,
        rule.get("sliding_window", 0),
        0.0,
        torch.randn(kv_heads * group, dtype=torch.bfloat16, device="cuda") if rule.get("sinks") else None,
    )
    held = DeviceLayout(
        page_size,
        torch.full((rows,), -1, dtype=torch.int32, device="cuda"),
        torch.zeros(rows, dtype=torch.int32, device="cuda"),
        torch.zeros(rows, 40, dtype=torch.int32, device="cuda"),
    )
    backend, found = TritonAttention(quick_launch), torch.empty_like(query)

    def run() -> None:
        backend.write(key, value, cache, held)
        backend.attend(query, found, cache, held, asked)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    assert torch.equal(cache.pages, expected_cache.pages), "padding was written"
    for _ in range(2):
        layout = fill(held, rng, rng.randint(1, rows))
        graph.replay()
        graph.replay()
        expected = torch.empty_like(query)
        ReferenceAttention().write(key, value, expected_cache, layout)
        ReferenceAttention().attend(query, expected, expected_cache, layout, asked)
        assert torch.equal(cache.pages, expected_cache.pages)
        count = layout.num_tokens
        assert torch.equal(found[count:], torch.zeros_like(found[count:]))
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 4 * 2.0**-7
