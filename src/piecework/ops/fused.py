"""Operators made of two: a norm or a gated activation, quantised to 8-bit floats on the way out.

Each computes what its parts compute one after another, with the rounding between them, so that a graph in which they
were fused gives the same bits. What is saved is the row that would be written and read again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from piecework.ops.activation import gelu_and_mul_reference, silu_and_mul_reference
from piecework.ops.norm import fused_add_rms_norm_reference, rms_norm_reference
from piecework.ops.operators import define
from piecework.ops.quantise import quant_fp8_dynamic_reference, quant_fp8_static_reference

STATIC, DYNAMIC = "quant_fp8_static", "quant_fp8_dynamic"
FUSED_FORMS = {
    ("rms_norm", STATIC): "rms_norm_quant_fp8_static",
    ("rms_norm", DYNAMIC): "rms_norm_quant_fp8_dynamic",
    ("fused_add_rms_norm", STATIC): "fused_add_rms_norm_quant_fp8_static",
    ("fused_add_rms_norm", DYNAMIC): "fused_add_rms_norm_quant_fp8_dynamic",
    ("silu_and_mul", STATIC): "silu_and_mul_quant_fp8_static",
    ("silu_and_mul", DYNAMIC): "silu_and_mul_quant_fp8_dynamic",
    ("gelu_and_mul", STATIC): "gelu_and_mul_quant_fp8_static",
    ("gelu_and_mul", DYNAMIC): "gelu_and_mul_quant_fp8_dynamic",
}
"""The form that does the work of a producer and of the quantisation of its result."""


def _then(first: Callable[..., Any], count: int, second: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reference that takes the first one's `count` arguments, then the second one's beside its tensor."""

    def reference(x: Tensor, *arguments: Any) -> Any:
        made = first(x, *arguments[: count - 1])
        rest = arguments[count - 1 :]
        if isinstance(made, tuple):
            quantised = second(made[0], *rest)
            return (*quantised, *made[1:]) if isinstance(quantised, tuple) else (quantised, *made[1:])
        return second(made, *rest)

    reference.__module__ = __name__
    return reference


_NORM = "Tensor x, Tensor? weight, float epsilon, int? variance_size"
_ADD_NORM = "Tensor x, Tensor residual, Tensor? weight, float epsilon, int? variance_size"
_STATIC, _DYNAMIC = "Tensor scale", "bool per_token, int group_size"
_PARTS = (
    ("rms_norm", _NORM, rms_norm_reference, 0),
    ("fused_add_rms_norm", _ADD_NORM, fused_add_rms_norm_reference, 1),
    ("silu_and_mul", "Tensor gate, Tensor up", silu_and_mul_reference, 0),
    ("gelu_and_mul", "Tensor gate, Tensor up, str approximate", gelu_and_mul_reference, 0),
)


def _forms(*names: str) -> dict[str, Callable[..., Any]]:
    found = {}
    for name, arguments, reference, more in _PARTS:
        if name in names:
            count = arguments.count(",") + 1
            for tail, quantise, results in (
                (_STATIC, quant_fp8_static_reference, 1 + more),
                (_DYNAMIC, quant_fp8_dynamic_reference, 2 + more),
            ):
                form = FUSED_FORMS[name, STATIC if tail is _STATIC else DYNAMIC]
                returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
                found[f"{form}({arguments}, {tail}) -> {returns}"] = _then(reference, count, quantise)
    return found


define(
    "rms_norm_quant_fp8",
    _forms("rms_norm", "fused_add_rms_norm"),
    made_of=("rms_norm", "quant_fp8"),
)
define("silu_and_mul_quant_fp8", _forms("silu_and_mul"), made_of=("silu_and_mul", "quant_fp8"))
define("gelu_and_mul_quant_fp8", _forms("gelu_and_mul"), made_of=("gelu_and_mul", "quant_fp8"))
