"""The one place where operators of our own are registered.

`torch.library.Library` and not `torch.library.custom_op`: the first call of an operator made with the latter imports
the whole compiler, which a warm start must not load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecework.values.declaration import split_op

LIBRARY = torch.library.Library("piecework", "FRAGMENT")


def register_opaque(
    schema: str, body: Callable[..., Any], fake: Callable[..., Any], *, capture: str, writes: str = "", reads: str = ""
) -> str:
    """Register an operator that graphs are cut at, and say which hidden state it writes or reads."""
    name = register(schema, body, fake)
    split_op(name, capture=capture, writes=writes, reads=reads)(body)
    return name


def register(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Register an operator's schema, body and fake; return its qualified name."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecework::{name}", fake, lib=LIBRARY)
    return f"piecework::{name}"
