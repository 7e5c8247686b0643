"""Operators that are not torch's own: their bodies, which a bound program calls directly, and their declarations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from piecework.errors import BindError, TraceError
from piecework.seam.names import find
from piecework.values.declaration import registry
from piecework.values.digest import digest_code, digest_text
from piecework.values.graph import inside
from piecework.values.record import Record


def resolve_bodies(record: Record, given: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the body of every opaque operator that a record calls.

    First what the caller gave, then the body declared with `split_op`, then the function of a
    `torch.library.custom_op`, then the operator itself, through the dispatcher.
    """
    bodies: dict[str, Callable[..., Any]] = {}
    called = {call["operator"] for region in record.regions for call in region["calls"] if "::" in call["operator"]}
    for name in called | set(inside(record.partition, record.split_ops)):
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


def declaration_digest(name: str) -> str:
    """Return the digest of what a trace is told of an operator: schema, the fake's code, hidden state; "" if torch's.

    The body is not among it: it is called, not traced.
    """
    short = name.partition(".")[0]
    entry = importlib.import_module("torch._library.simple_registry").singleton.find(short)
    fake = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    declared = registry.get(short)
    if fake is None and declared is None:
        return ""
    packet: Any = find("torch.ops." + short.replace("::", "."))
    schemas = sorted(str(getattr(packet, overload)._schema) for overload in packet.overloads())
    state = (declared.writes, declared.reads) if declared is not None else ()
    return digest_text(repr((schemas, _codes_of(getattr(fake, "func", None)), state)))


def _codes_of(function: Any, depth: int = 0) -> list[str]:
    """Return the digests of a function's code and of the functions that it holds, which a registration wraps it in."""
    code = getattr(function, "__code__", None)
    if code is None or depth > 4:
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell is not None]
    return [digest_code(code), *(digest for held in cells for digest in _codes_of(held, depth + 1))]


def changed_operators(declarations: Mapping[str, str]) -> str:
    """Return the first operator that is declared otherwise than a trace saw it; one that is not here says nothing."""
    for name, digest in declarations.items():
        try:
            now = declaration_digest(name)
        except TraceError:
            continue
        if now and now != digest:
            return f"operator `{name.partition('.')[0]}` is declared otherwise now"
    return ""
