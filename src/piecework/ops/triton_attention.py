"""Paged attention in Triton: a tile of a sequence's rows against its pages, keys split where there are few tiles.

All query heads that share a key head sit in one tile, so that each key is read once. Importing this needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from piecework.ops.cache import PagedCache
from piecework.ops.layout import Layout
from piecework.ops.reference import AttentionRule

TILE = 64  # query vectors of a tile: rows times the heads of a group
KEYS = 64  # keys that a tile looks at together
MOST_SPLITS = 16
WANTED_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


@dataclass(frozen=True)
class TritonPlan:
    """A step's tiles.

    Tensors:
        tiles       [N, 4]  i32  first row, rows, position of the first row, sequence
        page_table  [B, M]  i32
    """

    tiles: Tensor
    page_table: Tensor
    longest: int


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, out, partial, statistics, keys, values, tiles, page_table, sinks, scaling, softcap, window, num_rows,
    table_width, row_stride, page_stride, slot_stride, keys_per_split,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE_: tl.constexpr, KEYS_: tl.constexpr,
    SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, rows = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    first_position, sequence = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    at, width = tl.arange(0, TILE_), tl.arange(0, WIDTH)
    is_row = at // GROUP < rows
    row = first_row + at // GROUP
    head = kv_head * GROUP + at % GROUP
    position = first_position + at // GROUP
    place = row[:, None] * row_stride + head[:, None] * WIDTH + width[None, :]
    queries = tl.load(query + place, mask=is_row[:, None], other=0.0)
    highest = tl.full([TILE_], float("-inf"), tl.float32)
    total = tl.zeros([TILE_], tl.float32)
    summed = tl.zeros([TILE_, WIDTH], tl.float32)
    end = tl.minimum(first_position + rows, (split + 1) * keys_per_split)
    begin = split * keys_per_split
    if window > 0:
        begin = tl.maximum(begin, (first_position - window + 1) // KEYS_ * KEYS_)
    for start in range(begin, end, KEYS_):
        key_at = start + tl.arange(0, KEYS_)
        is_key = (key_at < end) & (key_at >= 0)
        page = tl.load(page_table + sequence * table_width + key_at // PAGE, mask=is_key, other=0).to(tl.int64)
        base = page * page_stride + (key_at % PAGE) * slot_stride + kv_head * WIDTH
        key = tl.load(keys + base[None, :] + width[:, None], mask=is_key[None, :], other=0.0)
        scores = tl.dot(queries, key).to(tl.float32) * scaling
        if HAS_CAP:
            bent = scores / softcap  # tanh, written with exp so that no library of device functions is needed
            scores = softcap * (1 - 2 / (tl.exp(2 * bent) + 1))
        seen = is_key[None, :] & (key_at[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (key_at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        base_now = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp(scores - base_now[:, None])
        scale = tl.exp(tl.where(highest == float("-inf"), float("-inf"), highest - base_now))
        value = tl.load(values + base[:, None] + width[None, :], mask=is_key[:, None], other=0.0)
        summed = summed * scale[:, None] + tl.dot(weights.to(value.dtype), value).to(tl.float32)
        total = total * scale + tl.sum(weights, 1)
        highest = now
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            now = tl.maximum(highest, sink)
            summed = summed * tl.exp(highest - now)[:, None]
            total = total * tl.exp(highest - now) + tl.exp(sink - now)
        tl.store(out + place, (summed / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        heads = tl.num_programs(1) * GROUP
        kept = (split * num_rows + row) * heads + head
        tl.store(partial + kept[:, None] * WIDTH + width[None, :], summed, mask=is_row[:, None])
        tl.store(statistics + kept * 2, highest, mask=is_row)
        tl.store(statistics + kept * 2 + 1, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    out, partial, statistics, sinks, num_rows, heads, row_stride,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    split, width = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    kept = (split * num_rows + row) * heads + head
    highest = tl.load(statistics + kept * 2)
    total = tl.load(statistics + kept * 2 + 1)
    now = tl.max(highest, 0)
    if HAS_SINKS:
        now = tl.maximum(now, tl.load(sinks + head).to(tl.float32))
    scale = tl.exp(highest - now)
    summed = tl.sum(tl.load(partial + kept[:, None] * WIDTH + width[None, :]) * scale[:, None], 0)
    whole = tl.sum(total * scale, 0)
    if HAS_SINKS:
        whole += tl.exp(tl.load(sinks + head).to(tl.float32) - now)
    tl.store(out + row * row_stride + head * WIDTH + width, (summed / whole).to(out.dtype.element_ty))


@dataclass(frozen=True)
class TritonAttention:
    """Attend all sequences of a step in one launch, two where keys are split. Heads are a power of two wide."""

    def attend(self, query: Tensor, out: Tensor, cache: PagedCache, layout: Layout, rule: AttentionRule) -> None:
        """Fill `out`; rows of padding become zeros.

        Tensors:
            query, out  [T, H, D]  model  contiguous
        """
        count, heads, width = layout.num_tokens, query.shape[1], query.shape[2]
        out[count:].zero_()
        if not count:
            return
        query = query.contiguous()
        group = heads // cache.row_shape[0]
        plan = layout.plan(f"triton {group}", lambda one: plan_tiles(one, group))
        programs = plan.tiles.shape[0] * cache.row_shape[0]
        splits = 1
        while splits < MOST_SPLITS and programs * splits < WANTED_PROGRAMS and plan.longest > splits * 4 * KEYS:
            splits *= 2
        per_split = -(-plan.longest // (splits * KEYS)) * KEYS
        scratch = (splits, count, heads) if splits > 1 else (1,)
        partial = query.new_empty((*scratch, width), dtype=torch.float32)
        statistics = query.new_empty((*scratch, 2), dtype=torch.float32)
        sinks = rule.sinks if rule.sinks is not None else query
        _attend[(plan.tiles.shape[0], cache.row_shape[0], splits)](
            query, out, partial, statistics, cache.key_pages, cache.value_pages, plan.tiles, plan.page_table, sinks,
            rule.scaling, rule.softcap, rule.sliding_window, count, plan.page_table.shape[1], heads * width,
            cache.key_pages.stride(0), cache.key_pages.stride(1), per_split,
            GROUP=group, WIDTH=width, PAGE=cache.page_size, TILE_=TILE, KEYS_=KEYS, SPLITS=splits,
            HAS_SINKS=rule.sinks is not None, HAS_CAP=rule.softcap != 0.0,
        )  # fmt: skip
        if splits > 1:
            _combine[(count, heads)](
                out, partial, statistics, sinks, count, heads, heads * width,
                WIDTH=width, SPLITS=splits, HAS_SINKS=rule.sinks is not None,
            )  # fmt: skip


def plan_tiles(layout: Layout, group: int) -> TritonPlan:
    """Cut every sequence's rows into tiles: once a step for each number of heads that share a key head."""
    rows_of_tile = max(1, TILE // group)
    tiles = [
        [first, min(rows_of_tile, span.last - first), span.start + first - span.first, number]
        for number, span in enumerate(layout.spans)
        for first in range(span.first, span.last, rows_of_tile)
    ]
    width = max(len(span.pages) for span in layout.spans)
    table = [[*span.pages, *[0] * (width - len(span.pages))] for span in layout.spans]

    def whole(values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=layout.device)

    return TritonPlan(whole(tiles), whole(table), max(span.length for span in layout.spans))
