"""Paged attention in Triton: a tile of a sequence's rows against its pages, keys split where there are few tiles.

All query heads that share a key head sit in one tile, so that each key is read once. Importing this needs Triton.

No number of a step specialises a kernel, so that a few calls before serving leave none to compile: a sequence that
brings one row and one that brings several, each short and long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton
from torch import Tensor

from piecework.ops.cache import Geometry, PagedCache
from piecework.ops.layout import DeviceLayout, Layout
from piecework.ops.reference import AttentionRule
from piecework.ops.triton_attention_kernels import attend, combine, write
from piecework.ops.triton_launch import WANTED_PROGRAMS, Kernel, Launch, Quick, by_triton

TILE = 64  # query vectors of a tile: rows times the heads of a group
ROW_TILE = 16  # the same where each sequence has one row; a product of matrices takes no fewer
KEYS = 64  # keys that a tile looks at together
MOST_SPLITS = 16


@dataclass(frozen=True)
class TritonPlan:
    """A step's tiles.

    Tensors:
        tiles       [N, 4]  i32  first row, rows, position of the first row, sequence
                    [N]     i32  lengths of sequences that bring one row each: row n is sequence n's
        page_table  [B, M]  i32
    """

    tiles: Tensor
    page_table: Tensor

    @property
    def has_rows(self) -> bool:
        return self.tiles.dim() == 1


_WRITE, _ATTEND, _COMBINE = Kernel(write), Kernel(attend), Kernel(combine)


def serves(head_dim: int) -> bool:
    """Tell whether heads of this width can be tiles of the kernels."""
    return head_dim >= ROW_TILE and head_dim == triton.next_power_of_2(head_dim)


@dataclass(frozen=True)
class Writing:
    """How a step's rows are written to caches of one geometry.

    Tensors:
        slots  [T]  i32
    """

    slots: Tensor
    launch: Launch


@dataclass(frozen=True)
class Attending:
    """How a step attends over caches of one geometry, its layers one after another in the same memory.

    Tensors:
        partial     [splits, T, H, D]  f32  what each part of a sequence's keys gives
        statistics  [splits, T, H, 2]  f32
    """

    plan: TritonPlan
    partial: Tensor
    statistics: Tensor
    attend: Launch
    combine: Launch | None


@dataclass(frozen=True)
class TritonAttention:
    """Attend all sequences of a step in one launch, two where keys are split. Heads are a power of two wide.

    `quick` makes launches cheaper for the host than Triton's own.
    """

    quick: Quick = by_triton
    capturable = True

    def write(self, key: Tensor, value: Tensor, cache: PagedCache, layout: Layout | DeviceLayout) -> None:
        """Write all rows in one launch.

        Tensors:
            key, value  [T, K, D]  model
        """
        key, value = _rows_of(key), _rows_of(value)
        steps = (key.stride(0), value.stride(0), cache.geometry)
        writing = _planned(layout, ("triton write", *steps), lambda: self._writing(layout, *steps))
        writing.launch(key, value, cache.key_pages, cache.value_pages, writing.slots)

    def _writing(
        self, layout: Layout | DeviceLayout, key_stride: int, value_stride: int, geometry: Geometry
    ) -> Writing:
        slots = layout.slots if isinstance(layout, DeviceLayout) else layout.plan("slots", _slots_of)
        width = geometry.kv_heads * geometry.head_dim
        strides, constants = (key_stride, value_stride, geometry.slot_stride), (width, triton.next_power_of_2(width))
        return Writing(slots, _WRITE.bind((slots.shape[0],), (), strides, constants, self.quick))

    def attend(
        self, query: Tensor, out: Tensor, cache: PagedCache, layout: Layout | DeviceLayout, rule: AttentionRule
    ) -> None:
        """Fill `out`; rows of padding become zeros.

        Tensors:
            query, out  [T, H, D]  model  out is contiguous
        """
        if isinstance(layout, Layout):
            if layout.num_tokens < out.shape[0]:
                out[layout.num_tokens :].zero_()
            if not layout.num_tokens:
                return
        query, sinks = query.contiguous(), rule.sinks if rule.sinks is not None else query
        at = ("triton", query.shape[1], query.dtype, sinks.dtype, cache.geometry, rule.key)
        one = _planned(layout, at, lambda: self._attending(query, cache.geometry, layout, rule))
        plan = one.plan
        one.attend(
            query, out, one.partial, one.statistics, cache.key_pages, cache.value_pages, plan.tiles, plan.page_table,
            sinks,
        )  # fmt: skip
        if one.combine is not None:
            one.combine(out, one.partial, one.statistics, sinks)

    def _attending(
        self, query: Tensor, geometry: Geometry, layout: Layout | DeviceLayout, rule: AttentionRule
    ) -> Attending:
        heads, width, kv_heads = query.shape[1], query.shape[2], geometry.kv_heads
        group = heads // kv_heads
        if isinstance(layout, DeviceLayout):
            count, plan = query.shape[0], TritonPlan(layout.sequence_lengths, layout.page_table)
        else:
            count, plan = layout.num_tokens, layout.plan(f"triton {group}", lambda one: plan_tiles(one, group))
        splits, has_sinks = _splits(plan, kv_heads), rule.sinks is not None
        shape = (splits, count, heads) if splits > 1 else (1,)
        tile = max(ROW_TILE, triton.next_power_of_2(group)) if plan.has_rows else TILE
        attend = _ATTEND.bind(
            (plan.tiles.shape[0], kv_heads, splits),
            (rule.scaling, rule.softcap, rule.sliding_window, count, plan.page_table.shape[1], splits),
            (heads * width, geometry.page_stride, geometry.slot_stride),
            (group, width, geometry.page_size, tile, KEYS, plan.has_rows, splits > 1, has_sinks, rule.softcap != 0.0),
            self.quick,
        )
        combine = _COMBINE.bind(
            (count, heads), (count, splits), (heads, heads * width), (width, MOST_SPLITS, has_sinks), self.quick
        )
        return Attending(
            plan,
            query.new_empty((*shape, width), dtype=torch.float32),
            query.new_empty((*shape, 2), dtype=torch.float32),
            attend,
            combine if splits > 1 else None,
        )


Planned = TypeVar("Planned", Writing, Attending)


def _planned(layout: Layout | DeviceLayout, at: Hashable, make: Callable[[], Planned]) -> Planned:
    """Return what the first layer of a step made for all; in a graph each makes its own, in the graph's memory."""
    return make() if isinstance(layout, DeviceLayout) else layout.plan(at, lambda _: make())


def _splits(plan: TritonPlan, kv_heads: int) -> int:
    """Return in how many parts each sequence's keys are read, so that the device has enough to do.

    Lengths do not matter, though short sequences leave parts empty: where they are the device's alone the same sums are
    made in the same order, so that a graph gives bit for bit what a step without one gives.
    """
    programs, splits = plan.tiles.shape[0] * kv_heads, 1
    while splits < MOST_SPLITS and programs * splits < WANTED_PROGRAMS:
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
    width = max(len(span.pages) for span in spans)
    table = [[*span.pages, *[0] * (width - len(span.pages))] for span in spans]
    if all(span.num_rows == 1 for span in spans):
        return TritonPlan(whole([span.length for span in spans]), whole(table))
    rows_of_tile = max(1, TILE // group)
    tiles = [
        [first, min(rows_of_tile, span.last - first), span.start + first - span.first, number]
        for number, span in enumerate(spans)
        for first in range(span.first, span.last, rows_of_tile)
    ]
    return TritonPlan(whole(tiles), whole(table))
