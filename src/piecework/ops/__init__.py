"""Operators of our own, and the step they run in.

Importing this package registers `piecework::kv_update` and `piecework::attention`. Both are opaque: a trace keeps each
as one node, and the split cuts there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from piecework.ops.attention import attention
from piecework.ops.cache import PagedCache
from piecework.ops.kv_update import kv_update
from piecework.ops.reference import AttentionBackend, AttentionRule, ReferenceAttention
from piecework.ops.step import Hook, Step, current_step, opaque_body, step_context

BODIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"piecework::kv_update": kv_update, "piecework::attention": attention}
)
"""Each operator's body, to be called directly by a bound program: a call through the dispatcher costs more than it."""

__all__ = [
    "BODIES",
    "AttentionBackend",
    "AttentionRule",
    "Hook",
    "PagedCache",
    "ReferenceAttention",
    "Step",
    "attention",
    "current_step",
    "kv_update",
    "opaque_body",
    "step_context",
]
