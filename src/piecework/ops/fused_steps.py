"""Opaque operators made of two: keys that are turned as they are written, attention that comes out quantised.

They stand where the KV write and attention stood, so that the cuts stay what they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.ops.attention import attention
from piecework.ops.kv_update import kv_update
from piecework.ops.library import register_opaque
from piecework.ops.operators import Form, Operator, operators
from piecework.ops.quantise import quant_fp8_static_reference
from piecework.ops.rotary import rotary_reference


def rotary_kv_update(
    key: Tensor, cos: Tensor, sin: Tensor, value: Tensor, rotary_dim: int, interleaved: bool, site: str
) -> Tensor:
    """Turn each row's key by its position and write it with its value; rows of padding are not written.

    The key turns in the dtype of its cosines where that is wider, and is rounded to its own before it is written.

    Tensors:
        key, value  [T, K, D]  model
        cos, sin    [T, 1, N]  any    `rotary_dim` wide, or half of that
        ->          [0]        model  a token: attention takes it
    """
    return kv_update(rotary_reference(key, cos, sin, rotary_dim, interleaved).to(key.dtype), value, site)


def _rotary_kv_update_fake(
    key: Tensor, cos: Tensor, sin: Tensor, value: Tensor, rotary_dim: int, interleaved: bool, site: str
) -> Tensor:
    return key.new_empty(0)


def attention_quant_fp8(
    query: Tensor,
    token: Tensor,
    out: Tensor,
    scale: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    site: str,
) -> None:
    """Attend as `piecework::attention` does, and quantise the result by a given scale.

    Tensors:
        query  [T, H, D]  model
        token  [0]        any    from the KV write of the same site
        out    [T, H, D]  any    float8_e4m3fn; MUTATED: filled
        scale  []         f32    one number
        sinks  [H]        any
    """
    attended = torch.empty_like(query)
    attention(query, token, attended, scaling, sliding_window, softcap, sinks, site)
    out.copy_(quant_fp8_static_reference(attended, scale))


def _attention_quant_fp8_fake(
    query: Tensor,
    token: Tensor,
    out: Tensor,
    scale: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    site: str,
) -> None:
    return None


ROTARY_KV_UPDATE = (
    "rotary_kv_update(Tensor key, Tensor cos, Tensor sin, Tensor value, int rotary_dim, bool interleaved, str site) "
    "-> Tensor"
)
ATTENTION_QUANT_FP8 = (
    "attention_quant_fp8(Tensor query, Tensor token, Tensor(a!) out, Tensor scale, float scaling, int sliding_window, "
    "float softcap, Tensor? sinks, str site) -> ()"
)
register_opaque(ROTARY_KV_UPDATE, rotary_kv_update, _rotary_kv_update_fake, capture="always", writes="kv_cache")
register_opaque(
    ATTENTION_QUANT_FP8, attention_quant_fp8, _attention_quant_fp8_fake, capture="uniform_decode", reads="kv_cache"
)
operators.add(
    Operator(
        "rotary_kv_update",
        (Form("rotary_kv_update", ROTARY_KV_UPDATE, rotary_kv_update),),
        made_of=("rotary",),
        is_opaque=True,
    )
)
operators.add(
    Operator(
        "attention_quant_fp8",
        (Form("attention_quant_fp8", ATTENTION_QUANT_FP8, attention_quant_fp8),),
        made_of=("quant_fp8",),
        is_opaque=True,
    )
)
