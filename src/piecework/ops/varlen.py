"""Attention by torch's own variable-length kernels over block tables: for releases and GPUs that have them.

Importing this module needs a release with `torch.nn.attention.varlen`. What these kernels do not know (sinks, a soft
cap) goes to the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

from piecework.ops.cache import PagedCache
from piecework.ops.layout import DeviceLayout, Layout
from piecework.ops.reference import AttentionBackend, AttentionRule, ReferenceAttention, on_host


@dataclass(frozen=True)
class VarlenPlan:
    """A step's layout as the kernels take it.

    Tensors:
        query_starts  [B+1]   i32
        lengths       [B]     i32
        page_table    [B, M]  i32
    """

    query_starts: Tensor
    lengths: Tensor
    page_table: Tensor
    most_rows: int
    most_keys: int


@dataclass(frozen=True)
class VarlenAttention:
    """Attend all sequences of a step in one call."""

    otherwise: AttentionBackend = field(default_factory=ReferenceAttention)
    capturable = False

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
        if not rule.is_plain:
            self.otherwise.attend(query, out, cache, layout, rule)
            return
        layout = on_host(layout)
        plan = layout.plan("varlen", plan_varlen)
        count = layout.num_tokens
        # A window of n sees the n - 1 tokens before a row; -1 is no bound on the left, 0 none to the right.
        varlen_attn_out(
            out[:count],
            query[:count],
            cache.key_pages,
            cache.value_pages,
            plan.query_starts,
            None,
            plan.most_rows,
            plan.most_keys,
            scale=rule.scaling,
            window_size=(rule.sliding_window - 1 if rule.sliding_window else -1, 0),
            enable_gqa=query.shape[1] != cache.row_shape[0],
            seqused_k=plan.lengths,
            block_table=plan.page_table,
        )
        out[count:].zero_()


def plan_varlen(layout: Layout) -> VarlenPlan:
    """Lay a step out for the kernels: once a step, whatever the number of layers."""
    spans = layout.spans
    width = max((len(span.pages) for span in spans), default=1)

    def whole(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=layout.device)

    return VarlenPlan(
        query_starts=whole([*(span.first for span in spans), layout.num_tokens]),
        lengths=whole([span.length for span in spans]),
        page_table=whole([[*span.pages, *[0] * (width - len(span.pages))] for span in spans]),
        most_rows=max((span.num_rows for span in spans), default=0),
        most_keys=max((span.length for span in spans), default=0),
    )
