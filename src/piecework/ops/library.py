"""The one place where operators of our own are registered.

`torch.library.Library` and not `torch.library.custom_op`: the first call of an operator made with the latter imports
the whole compiler, which a warm start must not load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("piecework", "FRAGMENT")


def register(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Register an operator's schema, body and fake; return its qualified name."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecework::{name}", fake, lib=LIBRARY)
    return f"piecework::{name}"
