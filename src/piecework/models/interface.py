"""Attention under Transformers' own interface: registered by name, so that no model's code is changed.

No mask function is registered beside it. Without one, Transformers builds no mask at all, and none of the dead
nodes that a mask would leave in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

import piecework.ops as ops
from piecework.errors import ModelError
from piecework.models.experts import run_experts
from piecework.models.folder import site_name

IMPLEMENTATION = "piecework"
PROBE = "piecework_probe"

_NOT_SERVED = ("position_bias", "indices", "block_indices", "sinks")
"""What some models hand to their attention beside queries, keys and values, and what ours does not know."""


@dataclass(frozen=True)
class SeenCall:
    """One call of attention, as the probe saw it."""

    site: str
    num_kv_heads: int
    head_dim: int
    sliding_window: int


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Write the keys and values of flat tokens, and attend over each sequence's pages.

    Tensors:
        query       [1, H, T, D]  model
        key, value  [1, K, T, D]  model  values may be narrower than keys; they are padded
        s_aux       [H]           any    sinks
        ->          [1, T, H, D]  model
    """
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < head_dim:
        value = F.pad(value, (0, head_dim - value_dim))
    query_THD, key_TKD, value_TKD = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out_THD = query.new_empty(query_THD.shape)
    site = site_name(module.layer_idx)  # type: ignore[arg-type]
    token = torch.ops.piecework.kv_update(key_TKD, value_TKD, site)
    torch.ops.piecework.attention(
        query_THD,
        token,
        out_THD,
        head_dim**-0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
        site,
    )
    if value_dim < head_dim:
        out_THD = out_THD[..., :value_dim]
    return out_THD[None], None


_SEEN: ContextVar[list[SeenCall] | None] = ContextVar("piecework_seen_calls", default=None)


@contextmanager
def probing() -> Iterator[list[SeenCall]]:
    """Collect the calls of attention that a model makes while its implementation is the probe."""
    seen: list[SeenCall] = []
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Note one call and refuse what `attend` would get wrong; compute nothing.

    Tensors:
        query       [1, H, T, D]  model
        key, value  [1, K, T, D]  model
        ->          [1, T, H, D]  model
    """
    kind = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise _refused(kind, "does not know its layer's number", "an attention module needs a `layer_idx`")
    if not getattr(module, "is_causal", True) or more.get("is_causal") is False:
        raise _refused(kind, "attends in both directions", "causal language models are served")
    if attention_mask is not None:
        raise _refused(kind, "brings a mask of its own", "causal masks and sliding windows are served")
    if key.shape[2] != query.shape[2]:
        raise _refused(kind, "attends over other tokens than its own", "self-attention is served")
    if value.shape[-1] > query.shape[-1] or key.shape[-1] != query.shape[-1]:
        raise _refused(kind, "has values wider than its keys", "values as wide as keys, or narrower, are served")
    for name in _NOT_SERVED:
        if more.get(name) is not None:
            raise _refused(kind, f"hands `{name}` to its attention", "its scores are not those of plain attention")
    seen = _SEEN.get()
    if seen is not None:
        seen.append(SeenCall(site_name(layer), key.shape[1], query.shape[-1], sliding_window or 0))
    return query.transpose(1, 2)[..., : value.shape[-1]], None


def _refused(kind: str, what: str, hint: str) -> ModelError:
    return ModelError(f"`{kind}` {what}, which is not served", hint=hint, facts={"attention": kind})


def register() -> tuple[str, ...]:
    """Make our implementations known to Transformers; return our operators' names, whose import registers them."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionInterface.register(PROBE, _probe)
    ExpertsInterface.register(IMPLEMENTATION, run_experts)
    return tuple(ops.BODIES)
