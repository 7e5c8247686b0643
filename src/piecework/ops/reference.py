"""Attention over a paged cache in torch's own terms: exact, on any device, the measure of all other backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.errors import StepError
from piecework.ops.cache import PagedCache
from piecework.ops.layout import DeviceLayout, Layout, Span

ROWS_AT_ONCE = 1024
SCORES_AT_ONCE = 1 << 24
"""Long prompts are attended in blocks of rows: a mask or a score matrix of a whole prompt grows with its square."""


@dataclass(frozen=True)
class AttentionRule:
    """How one call of the operator weighs keys.

    Tensors:
        sinks  [H]  model  a logit a head that takes part in the softmax and is then dropped; None where there is none
    """

    scaling: float
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def key(self) -> tuple[float, int, float, bool]:
        """All of the rule but the sinks' own numbers."""
        return self.scaling, self.sliding_window, self.softcap, self.sinks is not None

    @property
    def is_plain(self) -> bool:
        return self.softcap == 0.0 and self.sinks is None


class AttentionBackend(Protocol):
    """What writes keys and values to a paged cache, and attends over it.

    One that is `capturable` takes decode steps as a `DeviceLayout` too: it asks the device nothing.
    """

    @property
    def capturable(self) -> bool: ...

    def write(self, key: Tensor, value: Tensor, cache: PagedCache, layout: Layout | DeviceLayout) -> None:
        """Write each row to its slot, but for those of padding.

        Tensors:
            key, value  [T, K, D]  model
        """
        ...

    def attend(
        self, query: Tensor, out: Tensor, cache: PagedCache, layout: Layout | DeviceLayout, rule: AttentionRule
    ) -> None:
        """Fill `out` from `query` and the sequences' pages; rows of padding become zeros.

        Tensors:
            query, out  [T, H, D]  model
        """
        ...


@dataclass(frozen=True)
class ReferenceAttention:
    """The reference backend: one sequence at a time, so that no sequence's result depends on its neighbours.

    It plans on the host, so that it cannot be part of a graph.
    """

    capturable = False

    def write(self, key: Tensor, value: Tensor, cache: PagedCache, layout: Layout | DeviceLayout) -> None:
        """Write by index, or by one slice where the slots lie in a row.

        Tensors:
            key, value  [T, K, D]  model
        """
        writes = on_host(layout).writes
        count = writes.count
        if writes.slots is None:
            cache.key_rows[writes.start : writes.start + count] = key[:count]
            cache.value_rows[writes.start : writes.start + count] = value[:count]
        else:
            written = slice(count) if writes.rows is None else writes.rows
            cache.key_rows.index_copy_(0, writes.slots, key[written])
            cache.value_rows.index_copy_(0, writes.slots, value[written])

    def attend(
        self, query: Tensor, out: Tensor, cache: PagedCache, layout: Layout | DeviceLayout, rule: AttentionRule
    ) -> None:
        """Attend each sequence over its own pages; rows of padding become zeros.

        Tensors:
            query, out  [T, H, D]  model
        """
        layout = on_host(layout)
        for index, span in enumerate(layout.spans):
            if span.num_rows:
                _attend_span(query, out, cache, layout, index, span, rule)
        if layout.num_tokens < out.shape[0]:
            out[layout.num_tokens :].zero_()


def on_host(layout: Layout | DeviceLayout) -> Layout:
    """Return a layout whose numbers are on the host, or raise StepError: a backend that plans there needs one."""
    if isinstance(layout, DeviceLayout):
        raise StepError(
            "this attention plans on the host, and a graph cannot wait for that",
            hint="capture decode `piecewise`, or give the step a backend that is capturable",
        )
    return layout


def _attend_span(
    query: Tensor, out: Tensor, cache: PagedCache, layout: Layout, index: int, span: Span, rule: AttentionRule
) -> None:
    """Attend one sequence's rows, in blocks where a mask is needed.

    Tensors:
        query, out  [T, H, D]  model
    """
    window = rule.sliding_window
    whole = span.num_rows == span.length and (not window or span.length <= window)
    if rule.is_plain and whole:
        key, value = _read(cache, layout, index, span, 0, span.length)
        out[span.first : span.last] = _attend_plain(query[span.first : span.last], key, value, rule.scaling)
        return
    rows_at_once = ROWS_AT_ONCE
    if not rule.is_plain:
        rows_at_once = max(1, min(rows_at_once, SCORES_AT_ONCE // (query.shape[1] * span.length)))
    for first in range(span.first, span.last, rows_at_once):
        last = min(first + rows_at_once, span.last)
        first_position = span.start + first - span.first
        end = first_position + last - first
        first_key = max(0, first_position - window + 1) if window else 0
        key, value = _read(cache, layout, index, span, first_key, end)
        mask = None
        if last - first > 1:
            mask = layout.mask(last - first, first_position, end - first_key, first_key, window)
        if rule.is_plain:
            out[first:last] = _attend_masked(query[first:last], key, value, mask, rule.scaling)
        else:
            out[first:last] = _attend_scores(query[first:last], key, value, mask, rule)


def _read(cache: PagedCache, layout: Layout, index: int, span: Span, first_key: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of positions [first_key, end): a view where the pages lie in order.

    Tensors:
        ->  [L, K, D], [L, K, D]  model
    """
    size = layout.page_size
    if span.in_order:
        base = span.pages[0] * size
        return cache.key_rows[base + first_key : base + end], cache.value_rows[base + first_key : base + end]
    first_page, last_page = first_key // size, -(-end // size)
    pages = layout.page_index(index, first_page, last_page)
    first, last = first_key - first_page * size, end - first_page * size
    return (
        cache.key_pages.index_select(0, pages).flatten(0, 1)[first:last],
        cache.value_pages.index_select(0, pages).flatten(0, 1)[first:last],
    )


def _attend_plain(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend a whole sequence at once, causally.

    Tensors:
        query       [n, H, D]  model
        key, value  [n, K, D]  model
        ->          [n, H, D]  model
    """
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=query.shape[0] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend rows that see part of the keys, or one row that sees all.

    Tensors:
        query       [n, H, D]  model
        key, value  [L, K, D]  model
        mask        [n, L]     bool
        ->          [n, H, D]  model
    """
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _attend_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: AttentionRule) -> Tensor:
    """Attend with soft-capped scores or sinks, which torch's fused attention does not know.

    Tensors:
        query       [n, H, D]  model
        key, value  [L, K, D]  model
        mask        [n, L]     bool
        ->          [n, H, D]  model

    Scores stand in float32 at least: a soft cap in bfloat16 loses what the softmax then tells apart.
    """
    rows, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    precise = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(precise).view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    keys = key.to(precise).permute(1, 2, 0)[:, None]
    scores = torch.matmul(grouped, keys) * rule.scaling  # [K, G, n, L]
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.to(precise).view(kv_heads, heads // kv_heads, 1, 1).expand(-1, -1, rows, 1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    attended = torch.matmul(weights, value.to(precise).permute(1, 0, 2)[:, None])
    return attended.permute(2, 0, 1, 3).reshape(rows, heads, head_dim).to(query.dtype)
