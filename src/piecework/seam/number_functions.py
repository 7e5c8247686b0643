"""Functions of Python over numbers that torch's tracer does not know of sizes, in operators that it does know."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch


@cache
def teach_tracer() -> None:
    """Let torch's tracer see `divmod` as a quotient and a rest; for good, as it keeps what it was taught."""
    with contextlib.suppress(ValueError):  # somebody else taught it the same
        torch.compiler.substitute_in_graph(divmod)(_divmod)


def _divmod(x: Any, y: Any, /) -> tuple[Any, Any]:
    return x // y, x % y
