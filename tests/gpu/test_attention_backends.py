"""Attention backends on a GPU agree with the reference on random layouts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from piecework.ops import PagedCache, ReferenceAttention
from piecework.ops.layout import Layout, lay_out
from piecework.ops.reference import AttentionRule

pytestmark = pytest.mark.gpu


def backend(name: str) -> Any:
    if name == "varlen":
        try:
            from piecework.ops.varlen import VarlenAttention
        except ImportError:
            pytest.skip("this release has no varlen attention over block tables")
        return VarlenAttention()
    from piecework.ops.triton_attention import TritonAttention

    return TritonAttention()


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
@pytest.mark.parametrize("name", ["varlen", "triton"])
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
