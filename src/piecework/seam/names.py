"""Qualified names of what a graph calls, and back: the same text in every process.

`repr` of a target holds addresses (`<built-in method rsqrt of type object at 0x7f…>`), so it can be
neither a key nor a hand-over. A target is named by the first public place where it is found.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from piecework.errors import TraceError
from piecework.seam.lines import at, line_of

_ROOTS: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("operator", operator),
    ("math", math),
    ("torch._C._nn", torch._C._nn),
    ("torch.special", torch.special),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.sparse", torch.sparse),
    ("torch._C", torch._C),
    ("torch.Tensor", torch.Tensor),
)
_known: dict[Any, str] = {}


def name_of(target: Callable[..., Any]) -> str:
    """Return the qualified name of a call target, such as `torch.rsqrt` or `torch.ops.aten.add.Tensor`."""
    name = _known.get(target)
    if name is None:
        name = _known[target] = _find_name(target)
    return name


def _find_name(target: Callable[..., Any]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return "torch.ops." + target._qualified_op_name.replace("::", ".")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target._name}"
    short = getattr(target, "__name__", "")
    for root, place in _ROOTS:
        if short and getattr(place, short, None) is target:
            return f"{root}.{short}"
    module, qualified = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module and qualified and "<locals>" not in qualified and _walk(sys.modules.get(module), qualified) is target:
        return f"{module}.{qualified}"
    raise TraceError(
        f"the graph calls `{short or repr(target)}`, which has no importable name",
        hint="call a function that stands at the top level of a module, or make it an operator",
    )


def refuse_nameless(graph: fx.Graph) -> None:
    """Raise, with the user's line, where a graph calls what no other process could find."""
    for node in graph.nodes:
        if node.op == "call_function":
            try:
                name_of(node.target)
            except TraceError as error:
                line = line_of(node)
                raise TraceError(
                    f"{error.message}{at(line)}",
                    hint="write the line as tensor operations (`.data` and writes to NumPy arrays do not trace), "
                    "or put it into an opaque operator",
                    facts={"file": line[0], "line": line[1]},
                ) from error


def _walk(place: Any, path: str) -> Any:
    for part in path.split("."):
        place = getattr(place, part, None)
    return place


def find(name: str) -> Callable[..., Any]:
    """Return the call target of a qualified name; the inverse of `name_of`."""
    if name.startswith("torch.ops."):
        place: Any = torch.ops
        for part in name.split(".")[2:]:
            try:
                place = getattr(place, part)
            except AttributeError as error:
                raise TraceError(
                    f"operator `{name}` is not registered in this process",
                    hint="import the module that registers it first",
                ) from error
        return place  # type: ignore[no-any-return]
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        found = _walk(module, ".".join(parts[end:])) if module is not None else None
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise TraceError(f"`{name}` is not found in this process", hint="import the module that defines it first")


def registered_operators() -> tuple[str, ...]:
    """Return the name of every operator that is registered in this process, as `namespace::name`, in order."""
    names = torch._C._dispatch_get_all_op_names()
    return tuple(sorted({name.partition(".")[0] for name in names}))


def module_of_operator(name: str) -> str | None:
    """Return the module whose code registered `ns::op` from Python, where that is known."""
    try:
        overloads = importlib.import_module("torch._library.simple_registry").singleton
        entry = overloads.find(name)
    except (ImportError, AttributeError):
        return None
    source = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    return getattr(getattr(source, "func", None), "__module__", None)
