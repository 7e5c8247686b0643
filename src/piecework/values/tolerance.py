"""The one rule for "close enough"; torch-free.

A result may be off, against a reference in higher precision (float32; float64 for float32), by at most twice what
eager is off in the same dtype, with a floor of four units in the last place. The measure is the relative L2 error of
each output. Greedy tokens must be equal wherever the lead of the first logit exceeds what that error can move.
"""

from __future__ import annotations

FACTOR = 2.0
FLOOR_ULPS = 4.0

# The distance from 1.0 to the next number: IEEE 754 for the first three, the OCP 8-bit formats for the last two.
ULP = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}

REFERENCE = {"float32": "float64", "float64": "float64"}


def reference_dtype(dtype: str) -> str:
    """Return the dtype in which the reference of a result in `dtype` is computed."""
    return REFERENCE.get(dtype, "float32")


def allowed_error(eager_error: float, dtype: str) -> float:
    """Return the relative L2 error that a result in `dtype` may have where eager has `eager_error`."""
    return max(FACTOR * eager_error, FLOOR_ULPS * ULP.get(dtype, 0.0))


def decisive_margin(logits_norm: float, dtype: str, eager_error: float = 0.0) -> float:
    """Return the lead from which a greedy token must be equal: what the allowed error can move two logits apart."""
    return 2.0 * allowed_error(eager_error, dtype) * logits_norm
