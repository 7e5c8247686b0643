"""Paged attention in Triton: a tile of a sequence's rows against its pages, keys split where there are few tiles.

All query heads that share a key head sit in one tile, so that each key is read once. Importing this needs Triton.

No number of a step specialises a kernel, so that a few calls before serving leave none to compile: a sequence that
brings one row and one that brings several, each short and long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from piecework.ops.cache import PagedCache
from piecework.ops.layout import DeviceLayout, Layout
from piecework.ops.reference import AttentionRule

TILE = 64  # query vectors of a tile: rows times the heads of a group
ROW_TILE = 16  # the same where each sequence has one row; a product of matrices takes no fewer
KEYS = 64  # keys that a tile looks at together
MOST_SPLITS = 16
WANTED_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


@dataclass(frozen=True)
class TritonPlan:
    """A step's tiles. `longest` is 0 where lengths are known to the device alone.

    Tensors:
        tiles       [N, 4]  i32  first row, rows, position of the first row, sequence
                    [N]     i32  lengths of sequences that bring one row each: row n is sequence n's
        page_table  [B, M]  i32
    """

    tiles: Tensor
    page_table: Tensor
    longest: int

    @property
    def has_rows(self) -> bool:
        return self.tiles.dim() == 1


@triton.jit(do_not_specialize_on_alignment=["slots"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    key, value, keys, values, slots, key_stride, value_stride, slot_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_written = (at < WIDTH) & (slot >= 0)
    tl.store(keys + slot * slot_stride + at, tl.load(key + row * key_stride + at, mask=is_written), mask=is_written)
    value_at = values + slot * slot_stride + at
    tl.store(value_at, tl.load(value + row * value_stride + at, mask=is_written), mask=is_written)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["window", "num_rows", "table_width", "splits"],
    do_not_specialize_on_alignment=["tiles", "page_table"],
)
def _attend(  # type: ignore[no-untyped-def]
    query, out, partial, statistics, keys, values, tiles, page_table, sinks, scaling, softcap, window, num_rows,
    table_width, splits, row_stride, page_stride, slot_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE_: tl.constexpr, KEYS_: tl.constexpr,
    HAS_ROWS: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if HAS_ROWS:
        first_row, rows, first_position, sequence = tile, 1, tl.load(tiles + tile) - 1, tile
    else:
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
    total, summed = tl.zeros([TILE_], tl.float32), tl.zeros([TILE_, WIDTH], tl.float32)
    keys_per_split = tl.cdiv(tl.cdiv(first_position + rows, splits), KEYS_) * KEYS_
    end, begin = tl.minimum(first_position + rows, (split + 1) * keys_per_split), split * keys_per_split
    if window > 0:
        begin = tl.maximum(begin, (first_position - window + 1) // KEYS_ * KEYS_)
    for start in range(begin, end, KEYS_):
        key_at = start + tl.arange(0, KEYS_)
        is_key = (key_at < end) & (key_at >= 0)
        page = tl.load(page_table + sequence * table_width + key_at // PAGE, mask=is_key, other=0).to(tl.int64)
        base = page * page_stride + (key_at % PAGE) * slot_stride + kv_head * WIDTH
        key = tl.load(keys + base[None, :] + width[:, None], mask=is_key[None, :], other=0.0)
        scores = tl.dot(queries, key, input_precision="ieee") * scaling
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
        summed = tl.dot(weights.to(value.dtype), value, summed * scale[:, None], input_precision="ieee")
        total = total * scale + tl.sum(weights, 1)
        highest = now
    if not IS_SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            now = tl.maximum(highest, sink)
            summed = summed * tl.exp(highest - now)[:, None]
            total = total * tl.exp(highest - now) + tl.exp(sink - now)
        whole = tl.where(total == 0.0, 1.0, total)  # of padding
        tl.store(out + place, (summed / whole[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        kept = (split * num_rows + row) * tl.num_programs(1) * GROUP + head
        tl.store(partial + kept[:, None] * WIDTH + width[None, :], summed, mask=is_row[:, None])
        tl.store(statistics + kept * 2, highest, mask=is_row)
        tl.store(statistics + kept * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "splits"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    out, partial, statistics, sinks, num_rows, splits, heads, row_stride,
    WIDTH: tl.constexpr, MOST: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    split, width = tl.arange(0, MOST), tl.arange(0, WIDTH)
    is_split = split < splits
    kept = (split * num_rows + row) * heads + head
    highest = tl.load(statistics + kept * 2, mask=is_split, other=float("-inf"))
    total = tl.load(statistics + kept * 2 + 1, mask=is_split, other=0.0)
    now = tl.max(highest, 0)
    if HAS_SINKS:
        now = tl.maximum(now, tl.load(sinks + head).to(tl.float32))
    scale = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - now))
    parts = tl.load(partial + kept[:, None] * WIDTH + width[None, :], mask=is_split[:, None], other=0.0)
    summed = tl.sum(parts * scale[:, None], 0)
    whole = tl.sum(total * scale, 0)
    if HAS_SINKS:
        whole += tl.exp(tl.load(sinks + head).to(tl.float32) - now)
    whole = tl.where(whole == 0.0, 1.0, whole)  # of padding
    tl.store(out + row * row_stride + head * WIDTH + width, (summed / whole).to(out.dtype.element_ty))


def serves(head_dim: int) -> bool:
    """Tell whether heads of this width can be tiles of the kernels."""
    return head_dim >= ROW_TILE and head_dim == triton.next_power_of_2(head_dim)


@dataclass(frozen=True)
class TritonAttention:
    """Attend all sequences of a step in one launch, two where keys are split. Heads are a power of two wide."""

    capturable = True

    def write(self, key: Tensor, value: Tensor, cache: PagedCache, layout: Layout | DeviceLayout) -> None:
        """Write all rows in one launch.

        Tensors:
            key, value  [T, K, D]  model
        """
        slots = layout.slots if isinstance(layout, DeviceLayout) else layout.plan("slots", _slots_of)
        width = cache.row_shape[0] * cache.row_shape[1]
        key, value = _rows_of(key), _rows_of(value)
        _write[(slots.shape[0],)](
            key, value, cache.key_pages, cache.value_pages, slots, key.stride(0), value.stride(0),
            cache.key_pages.stride(1), WIDTH=width, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip

    def attend(
        self, query: Tensor, out: Tensor, cache: PagedCache, layout: Layout | DeviceLayout, rule: AttentionRule
    ) -> None:
        """Fill `out`; rows of padding become zeros.

        Tensors:
            query, out  [T, H, D]  model  out is contiguous
        """
        heads, width = query.shape[1], query.shape[2]
        group = heads // cache.row_shape[0]
        if isinstance(layout, DeviceLayout):
            count, plan = query.shape[0], TritonPlan(layout.sequence_lengths, layout.page_table, 0)
        else:
            count = layout.num_tokens
            out[count:].zero_()
            if not count:
                return
            plan = layout.plan(f"triton {group}", lambda one: plan_tiles(one, group))
        query = query.contiguous()
        splits = _splits(plan, cache.row_shape[0])
        scratch = (splits, count, heads) if splits > 1 else (1,)
        partial = query.new_empty((*scratch, width), dtype=torch.float32)
        statistics = query.new_empty((*scratch, 2), dtype=torch.float32)
        sinks = rule.sinks if rule.sinks is not None else query
        _attend[(plan.tiles.shape[0], cache.row_shape[0], splits)](
            query, out, partial, statistics, cache.key_pages, cache.value_pages, plan.tiles, plan.page_table, sinks,
            rule.scaling, rule.softcap, rule.sliding_window, count, plan.page_table.shape[1], splits, heads * width,
            cache.key_pages.stride(0), cache.key_pages.stride(1),
            GROUP=group, WIDTH=width, PAGE=cache.page_size, KEYS_=KEYS, HAS_ROWS=plan.has_rows, IS_SPLIT=splits > 1,
            TILE_=max(ROW_TILE, triton.next_power_of_2(group)) if plan.has_rows else TILE,
            HAS_SINKS=rule.sinks is not None, HAS_CAP=rule.softcap != 0.0,
        )  # fmt: skip
        if splits > 1:
            _combine[(count, heads)](
                out, partial, statistics, sinks, count, splits, heads, heads * width,
                WIDTH=width, MOST=MOST_SPLITS, HAS_SINKS=rule.sinks is not None,
            )  # fmt: skip


def _splits(plan: TritonPlan, kv_heads: int) -> int:
    """Return in how many parts each sequence's keys are read, so that the device has enough to do.

    A part has some tiles of keys; where lengths are the device's alone, short sequences leave parts empty.
    """
    programs, splits = plan.tiles.shape[0] * kv_heads, 1
    while splits < MOST_SPLITS and programs * splits < WANTED_PROGRAMS:
        if plan.longest and plan.longest <= splits * 4 * KEYS:
            break
        splits *= 2
    return splits


def _rows_of(values: Tensor) -> Tensor:
    """Return rows whose numbers lie side by side, as they mostly do.

    Tensors:
        values  [T, K, D]  model
        ->      [T, K, D]  model
    """
    return values if values.stride()[1:] == (values.shape[2], 1) else values.contiguous()


def _slots_of(layout: Layout) -> Tensor:
    """Return the slot of each row on the device.

    Tensors:
        ->  [T]  i32
    """
    return torch.tensor(layout.slots, dtype=torch.int32, device=layout.device)


def plan_tiles(layout: Layout, group: int) -> TritonPlan:
    """Cut every sequence's rows into tiles: once a step for each number of heads that share a key head."""

    def whole(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=layout.device)

    spans = [span for span in layout.spans if span.num_rows]
    longest, width = max(span.length for span in spans), max(len(span.pages) for span in spans)
    table = [[*span.pages, *[0] * (width - len(span.pages))] for span in spans]
    if all(span.num_rows == 1 for span in spans):
        return TritonPlan(whole([span.length for span in spans]), whole(table), longest)
    rows_of_tile = max(1, TILE // group)
    tiles = [
        [first, min(rows_of_tile, span.last - first), span.start + first - span.first, number]
        for number, span in enumerate(spans)
        for first in range(span.first, span.last, rows_of_tile)
    ]
    return TritonPlan(whole(tiles), whole(table), longest)
