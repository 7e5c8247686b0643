"""The implementations in Triton: declared here without importing it, for devices of kind `cuda`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piecework.ops.operators import implement

_KERNELS = "piecework.ops.triton_kernels"
WIDEST = 16384  # a row is one block of a program


def _body(name: str) -> Callable[..., Any]:
    """Return a body that imports the kernels when it is first called.

    Results lie as the registry promises: like the first tensor, where a result has its shape.
    """

    def body(first: Tensor, *arguments: Any) -> Any:
        results = getattr(importlib.import_module(_KERNELS), name)(first, *arguments)
        return tuple(_like(each, first) for each in results) if isinstance(results, tuple) else _like(results, first)

    return body


def _like(result: Tensor, first: Tensor) -> Tensor:
    if first.is_contiguous() or result.shape != first.shape:
        return result
    wanted = torch.empty_like(first, dtype=result.dtype)
    return result if wanted.stride() == result.stride() else wanted.copy_(result)


def _quantise(x: Tensor, per_token: bool, group_size: int) -> Any:
    return _body("quantise_rows")(x)


def _is_narrow(arguments: Any) -> bool:
    """Tell whether a row fits one block; a call in a graph stands as nodes, whose values are traced ones."""
    first = next(iter(arguments.values()))
    value = getattr(first, "meta", {}).get("example_value", first)
    return bool(value.shape[-1] <= WIDEST)


for _operator, _form, _function, _serves in (
    ("rms_norm", "rms_norm", _body("rms_norm"), _is_narrow),
    ("fused_add_rms_norm", "fused_add_rms_norm", _body("fused_add_rms_norm"), _is_narrow),
    ("silu_and_mul", "silu_and_mul", _body("silu_and_mul"), None),
    (
        "quant_fp8",
        "quant_fp8_dynamic",
        _quantise,
        lambda arguments: arguments["per_token"] is True and not arguments["group_size"] and _is_narrow(arguments),
    ),
):
    implement(
        _operator,
        "triton",
        {_form: _function},
        devices=("cuda",),
        needs="triton",
        serves=_serves,
        source_module=_KERNELS,
    )
