"""Conditions on sizes, evaluated at many sizes at once; and where rounding leaves their truth uncertain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piecework.values.predicate import evaluate, is_exact

_TO_WHOLE = ("math.floor", "math.ceil", "math.trunc", "int", "round")
_ROUNDING = 1e-9  # far above what a few operations in double precision may be off, far below what sizes differ by


def certain(text: str, values: Mapping[str, Any], count: int) -> torch.Tensor:
    """Return where a condition certainly holds: not where a float's last digits would decide.

    The text may round otherwise than the model does, for constants in it are folded. What is cut off for that, one size
    at a time, is traced at that size, where Python's own arithmetic decides.

    Tensors:
        ->  [N]  bool
    """
    found = truth(text, values, count)
    if is_exact(text):
        return found
    doubt = torch.zeros_like(found)
    for whole, compared in itertools.product((-_ROUNDING, 0.0, _ROUNDING), repeat=2):
        doubt |= _truth(text, values, count, _nudged(whole, compared)) != found
    return found & ~doubt


def _nudged(whole: float, compared: float) -> Mapping[str, Callable[..., Any]]:
    """Return the functions of a text, floats a little off where they are made whole, and where they are compared."""

    def off(value: Any, by: float) -> Any:
        number = _tensor(value)
        return number + by * number.abs().clamp(min=1) if number.dtype == torch.float64 else value

    made = {name: lambda value, made=_VECTORS[name]: made(off(value, whole)) for name in _TO_WHOLE}
    return {**_VECTORS, **made, "compare": lambda sign, a, b: sign(off(a, compared), b)}


def truth(text: str, values: Mapping[str, Any], count: int) -> torch.Tensor:
    """Return where a condition holds, of so many sizes of each name.

    Tensors:
        ->  [N]  bool
    """
    return _truth(text, values, count, _VECTORS)


def _truth(
    text: str, values: Mapping[str, Any], count: int, functions: Mapping[str, Callable[..., Any]]
) -> torch.Tensor:
    found = evaluate(text, values, functions)
    return found if isinstance(found, torch.Tensor) else torch.full((count,), bool(found))


def _tensor(value: Any) -> torch.Tensor:
    dtype = torch.float64 if isinstance(value, float) else None
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)


def _whole(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda value: function(_tensor(value).double()).long()


_VECTORS: Mapping[str, Callable[..., Any]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "not": lambda a: ~a if isinstance(a, torch.Tensor) else not a,
    "min": lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
    "max": lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
    "abs": lambda a: abs(a), "math.floor": _whole(torch.floor), "math.ceil": _whole(torch.ceil),
    "math.trunc": _whole(torch.trunc), "int": _whole(torch.trunc), "round": _whole(torch.round),
    "float": lambda a: _tensor(a).double(), "torch.sym_float": lambda a: _tensor(a).double(),
    "math.log2": lambda a: _tensor(a).double().log2(), "math.sqrt": lambda a: _tensor(a).double().sqrt(),
    "/": lambda a, b: _tensor(a).double() / _tensor(b).double(),
}  # fmt: skip
