"""How far one result is from what it should be, held to the one tolerance rule.

A result is compared with a reference in higher precision, and may be off by what the rule allows for what eager itself
is off. Layout is compared exactly: whoever takes the result was compiled for these strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.values.tolerance import ULP, allowed_error

# Where no reference can be computed, a result is held to eager's own, and eager is taken to be off by this much.
_UNKNOWN_ULPS = 16.0
_NARROW = 16.0


@dataclass(frozen=True)
class Difference:
    """One tensor's relative L2 error, what it may be, and in words what is wrong; `fault` is empty if nothing is."""

    name: str
    error: float = 0.0
    allowed: float = 0.0
    ulps: float = 0.0
    fault: str = ""
    is_compared: bool = True

    @property
    def is_fault(self) -> bool:
        return bool(self.fault)

    @property
    def is_narrow(self) -> bool:
        """Whether the fault is one of rounding alone, so that eager's own luck with these inputs may decide it."""
        return self.is_fault and self.error <= _NARROW * self.allowed


def compare(
    name: str,
    result: object,
    eager: Tensor,
    reference: Tensor | None = None,
    settled: Tensor | None = None,
    *,
    eager_error: float = 0.0,
) -> Difference:
    """Compare one result with eager's and with the reference; `settled` marks the elements that hold a value.

    `eager_error` is what eager is known to be off on inputs like these, where that is more than it is here.

    Tensors:
        result     any  model  as the artifact gave it
        eager      any  model  as the text gives it
        reference  any         the same in higher precision, on any device: there it is compared
        settled    any  bool   false where memory was never written or numbers are random
    """
    wrong = _layout_fault(result, eager)
    if wrong:
        return Difference(name, math.inf, 0.0, math.inf, f"`{name}` {wrong}")
    assert isinstance(result, Tensor)
    if reference is not None and reference.device != eager.device:
        result, eager = result.to(reference.device), eager.to(reference.device)
        settled = settled if settled is None else settled.to(reference.device)
    known = torch.ones_like(eager, dtype=torch.bool) if settled is None else settled
    if not (eager.is_floating_point() or eager.is_complex()):
        return _compare_whole(name, result, eager, reference, known)
    exact = eager if reference is None else reference
    if settled is None and bool(_is_finite(eager).all()) and bool(_is_finite(exact).all()):
        return _compare_numbers(name, result, eager, exact, reference is not None, eager_error)
    agreed = known & ~_is_finite(eager) & _is_same(eager, exact)
    if bool((agreed & ~_is_same(result, eager)).any()):
        fault = f"`{name}` is a number where eager has none, or another infinity"
        return Difference(name, math.inf, 0.0, math.inf, fault)
    compared = known & _is_finite(eager) & _is_finite(exact)
    if not bool(compared.any()):
        return Difference(name, is_compared=False)
    values = (result[compared], eager[compared], exact[compared])
    return _compare_numbers(name, *values, reference is not None, eager_error)


def _compare_numbers(
    name: str, result: Tensor, eager: Tensor, exact: Tensor, is_referenced: bool, known_error: float
) -> Difference:
    """Compare what is a number in eager and in the reference."""
    dtype = _real_dtype(eager)
    off = relative_error(eager, exact) if is_referenced else _UNKNOWN_ULPS * ULP.get(dtype, 0.0)
    error, allowed = relative_error(result, exact), allowed_error(max(off, known_error), dtype)
    ulps = error / ULP[dtype] if dtype in ULP else 0.0
    is_fault = not error <= allowed  # written so that an error that is no number is one
    fault = f"`{name}` is off by {error:.2e}, allowed are {allowed:.2e} ({ulps:.0f} ulp of {dtype})" if is_fault else ""
    return Difference(name, error, allowed, ulps, fault)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return the L2 norm of the difference over that of what it should be; where that is 0, of the difference alone.

    Tensors:
        value, exact  any
    """
    wide = torch.complex128 if exact.is_complex() else torch.float64
    right = exact.to(wide)
    scale = float(right.norm()) or 1.0
    return float((value.to(wide) - right).norm()) / scale


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, also where elements share memory.

    Tensors:
        tensor  any
        ->      any
    """
    if tensor.numel() == 0:
        return tensor.clone()
    count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((count,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def stride_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that matter: of dimensions that hold more than one element.

    Tensors:
        tensor  any
    """
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _layout_fault(result: object, eager: Tensor) -> str:
    if not isinstance(result, Tensor):
        return f"is a `{type(result).__name__}`, in eager a tensor"
    if result.shape != eager.shape:
        return f"has shape `{list(result.shape)}`, in eager `{list(eager.shape)}`"
    if result.dtype != eager.dtype or result.device.type != eager.device.type:
        return f"is `{result.dtype}` on `{result.device.type}`, in eager `{eager.dtype}` on `{eager.device.type}`"
    if eager.numel() and stride_of(result) != stride_of(eager):
        return f"has strides `{list(result.stride())}`, in eager `{list(eager.stride())}`"
    return ""


def _compare_whole(name: str, result: Tensor, eager: Tensor, reference: Tensor | None, known: Tensor) -> Difference:
    """Compare whole numbers and truth values: the measure is the share of elements that differ."""
    count = max(1, int(known.sum()))
    error = int(((result != eager) & known).sum()) / count
    off = 0.0 if reference is None else int(((reference != eager) & known).sum()) / count
    allowed = allowed_error(off, "float32")
    fault = f"`{name}` differs in {error:.2%} of its elements, allowed are {allowed:.2%}" if error > allowed else ""
    return Difference(name, error, allowed, 0.0, fault)


def _is_finite(tensor: Tensor) -> Tensor:
    # Eight-bit floats know next to no operation of their own.
    return torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)


def _is_same(one: Tensor, two: Tensor) -> Tensor:
    left, right = (t.float() if t.element_size() == 1 else t for t in (one, two))
    return (left == right) | (torch.isnan(left) & torch.isnan(right))


def _real_dtype(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(name, name)
