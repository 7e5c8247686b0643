"""Find quantisation to 8-bit floats by a given scale: `(x.float() / scale).clamp(-448, 448).to(float8_e4m3fn)`.

A quotient in a narrower dtype rounds twice and is another function; a scale is one number, or one a row.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from piecework.passes.found import Found
from piecework.passes.reading import Miss, argument, called, dtype_of, is_cast, pair, spec_of

LARGEST = 448.0  # of float8_e4m3fn


def find_quant(node: fx.Node) -> Found | None:
    """Find a static quantisation whose last cast is this node."""
    if not is_cast(node) or dtype_of(node) != "float8_e4m3fn":
        return None
    clamped: Any = node.args[0]
    if called(clamped) not in ("clamp", "clip"):
        return None
    bounds = (argument(clamped, 1, "min"), argument(clamped, 2, "max"))
    quotient: Any = clamped.args[0]
    if bounds != (-LARGEST, LARGEST) or called(quotient) not in ("truediv", "div"):
        return None
    precise, scale = pair(quotient)
    if spec_of(scale) is None or dtype_of(scale) != "float32":
        raise Miss("the scale is no float32 tensor")
    if dtype_of(precise) != "float32":
        raise Miss(f"the quotient is taken in `{dtype_of(precise)}`")
    x = precise.args[0] if is_cast(precise) else precise
    made, given = spec_of(quotient), spec_of(x)
    if made is None or given is None or made.shape != given.shape:
        raise Miss("the scale is wider than the row")
    inside = [clamped, quotient]
    if precise is not x and set(precise.users) == {quotient}:
        inside.append(precise)
    return Found(node, "quant_fp8_static", (x, scale), tuple(inside))
