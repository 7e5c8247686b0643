"""Operators of our own, and the step they run in.

Importing this package registers `piecework::kv_update` and `piecework::attention`, which are opaque: a trace keeps each
as one node, and the split cuts there. The others are not: they stay inside the pieces. Those of the registry
(`piecework.ops.operators`) have a reference in plain PyTorch and further implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import piecework.ops.fused  # registers what is made of two
import piecework.ops.triton_implementations  # noqa: F401
from piecework.ops.activation import gelu_and_mul, silu_and_mul
from piecework.ops.attention import attention
from piecework.ops.cache import PagedCache
from piecework.ops.fused_steps import attention_quant_fp8, rotary_kv_update
from piecework.ops.grouped_matmul import grouped_matmul
from piecework.ops.kv_update import kv_update
from piecework.ops.norm import fused_add_rms_norm, rms_norm
from piecework.ops.operators import implement
from piecework.ops.quantise import quant_fp8
from piecework.ops.reference import AttentionBackend, AttentionRule, ReferenceAttention
from piecework.ops.rotary import rotary
from piecework.ops.rows import fill_rows as fill_rows
from piecework.ops.rows import first_rows as first_rows
from piecework.ops.state_scan import RecurrentState, allocate_states, state_scan
from piecework.ops.step import Hook, Step, current_step, opaque_body, step_context

BODIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "piecework::kv_update": kv_update,
        "piecework::attention": attention,
        "piecework::grouped_matmul": grouped_matmul,
        "piecework::rotary_kv_update": rotary_kv_update,
        "piecework::attention_quant_fp8": attention_quant_fp8,
        "piecework::state_scan": state_scan,
    }
)
"""Each operator's body, to be called directly by a bound program: a call through the dispatcher costs more than it."""

OPAQUE: tuple[str, ...] = (
    "piecework::kv_update",
    "piecework::attention",
    "piecework::rotary_kv_update",
    "piecework::attention_quant_fp8",
    "piecework::state_scan",
)
"""The operators of our own that the split always cuts at."""

__all__ = [
    "BODIES",
    "OPAQUE",
    "AttentionBackend",
    "AttentionRule",
    "Hook",
    "PagedCache",
    "ReferenceAttention",
    "RecurrentState",
    "Step",
    "allocate_states",
    "attention",
    "current_step",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "grouped_matmul",
    "implement",
    "kv_update",
    "opaque_body",
    "quant_fp8",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "step_context",
]
