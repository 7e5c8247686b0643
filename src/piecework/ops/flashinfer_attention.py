"""Attention by FlashInfer's paged kernels, for those who have the package: `pip install 'piecework[flashinfer]'`.

Importing this module needs it. Sinks go to the reference. It is not chosen by itself, but given to a step by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from piecework.ops.cache import PagedCache
from piecework.ops.layout import DeviceLayout, Layout
from piecework.ops.reference import AttentionBackend, AttentionRule, ReferenceAttention, on_host

WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class FlashInferPlan:
    """A step's pages as FlashInfer takes them: those of all sequences in a row, and where each sequence's begin.

    Tensors:
        query_starts  [B+1]  i32
        page_starts   [B+1]  i32
        pages         [N]    i32
        last_counts   [B]    i32  tokens on each sequence's last page
    """

    query_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_counts: Tensor


@dataclass(frozen=True)
class FlashInferAttention:
    """Attend all sequences of a step in one call, planned by FlashInfer once a step for each kind of layer."""

    otherwise: AttentionBackend = field(default_factory=ReferenceAttention)
    capturable = False
    _planned: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def write(self, key: Tensor, value: Tensor, cache: PagedCache, layout: Layout | DeviceLayout) -> None:
        """Write each row to its slot.

        Tensors:
            key, value  [T, K, D]  model
        """
        self.otherwise.write(key, value, cache, layout)

    def attend(
        self, query: Tensor, out: Tensor, cache: PagedCache, layout: Layout | DeviceLayout, rule: AttentionRule
    ) -> None:
        """Fill `out`; rows of padding become zeros.

        Tensors:
            query, out  [T, H, D]  model
        """
        if rule.sinks is not None:
            self.otherwise.attend(query, out, cache, layout, rule)
            return
        layout, count = on_host(layout), on_host(layout).num_tokens
        if count:
            kind = (query.shape[1], cache.geometry, query.dtype, rule.key)
            planned = layout.plan(f"flashinfer {kind}", partial(self._plan, kind, query, cache, rule))
            planned.run(query[:count].contiguous(), (cache.key_pages, cache.value_pages), out=out[:count])
        out[count:].zero_()

    def _plan(self, kind: Any, query: Tensor, cache: PagedCache, rule: AttentionRule, layout: Layout) -> Any:
        """Have FlashInfer plan a step for one kind of layer; what it plans in is kept from step to step."""
        if kind not in self._planned:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            self._planned[kind] = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        planned, step = self._planned[kind], layout.plan("flashinfer", plan_pages)
        planned.plan(
            step.query_starts, step.page_starts, step.pages, step.last_counts,
            query.shape[1], *cache.row_shape, cache.page_size,
            causal=True, sm_scale=rule.scaling, logits_soft_cap=rule.softcap or None,
            # It counts the tokens before a row; -1 is no bound.
            window_left=rule.sliding_window - 1 if rule.sliding_window else -1,
            q_data_type=query.dtype, kv_data_type=cache.key_pages.dtype,
        )  # fmt: skip
        return planned


def plan_pages(layout: Layout) -> FlashInferPlan:
    """Lay a step's pages out in a row: once a step, whatever the number of layers."""
    spans = [span for span in layout.spans if span.num_rows]
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + len(span.pages))

    def whole(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=layout.device)

    return FlashInferPlan(
        query_starts=whole([*(span.first for span in spans), layout.num_tokens]),
        page_starts=whole(starts),
        pages=whole([page for span in spans for page in span.pages]),
        last_counts=whole([(span.length - 1) % layout.page_size + 1 for span in spans]),
    )
