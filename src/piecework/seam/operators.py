"""The bodies of opaque operators: what a bound program calls directly, not through the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from piecework.errors import BindError
from piecework.seam.names import find
from piecework.values.declaration import registry
from piecework.values.record import Record


def resolve_bodies(record: Record, given: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the body of every opaque operator that a record calls.

    First what the caller gave, then the body declared with `split_op`, then the function of a
    `torch.library.custom_op`, then the operator itself, through the dispatcher.
    """
    bodies: dict[str, Callable[..., Any]] = {}
    for name in {call["operator"] for region in record.regions for call in region["calls"] if "::" in call["operator"]}:
        short = name.partition(".")[0]
        declared = registry.get(short)
        body = given.get(name) or given.get(short) or (declared.body if declared is not None else None)
        bodies[name] = body or _custom_op_body(short, record.device) or _dispatched(name)
    return bodies


def _custom_op_body(name: str, device: str) -> Callable[..., Any] | None:
    """Return the plain function of a `custom_op`: its first call through the dispatcher imports the compiler."""
    module = sys.modules.get("torch._library.custom_ops")
    definition = getattr(module, "OPDEFS", {}).get(name) if module is not None else None
    functions = getattr(definition, "_backend_fns", {})
    body = functions.get(device) or functions.get(None)
    return body if callable(body) else None


def _dispatched(name: str) -> Callable[..., Any]:
    try:
        return find("torch.ops." + name.replace("::", "."))
    except Exception as error:
        raise BindError(
            f"operator `{name}` has no body here",
            hint="import the module that registers it, or hand its body in by `ops=`",
            facts={"operator": name},
        ) from error
