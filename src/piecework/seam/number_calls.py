"""Numbers that follow from sizes as calls of a graph: as the model wrote them, or rebuilt from their expression.

Sympy folds constants (`n * 0.1 * 10` is `1.0 * n` to it), which rounds otherwise than Python does. A number in which a
float stands is therefore computed by the calls that the model made; whole numbers are the same either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from piecework.errors import TraceError
from piecework.seam.lines import at, line_of


def is_whole(expression: Any) -> bool:
    """Tell whether nothing but whole numbers stands in an expression, at no step of it."""
    return all(
        part.is_integer for part in sympy.preorder_traversal(expression) if isinstance(part, sympy.Expr)
    )  # fmt: skip


def as_function(node: fx.Node) -> None:
    """Make a call of a number's method (`__round__`) one of the function that people write."""
    if node.op == "call_method" and node.target == "__round__":
        node.op, node.target = "call_function", round


def build_number(graph: fx.Graph, expression: sympy.Expr, env: Mapping[sympy.Symbol, fx.Node], user: fx.Node) -> Any:
    """Write the calls that compute an expression over the nodes of its symbols; `user` is the node that needs it."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float:
        return float(expression)
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    if not expression.free_symbols <= env.keys():
        raise _refusal(
            user, "a number", "that is read from no tensor of its inputs",
            "a size that varies is read from an input that the model does something with; let a number that is "
            "fixed be one of Python's own, as in `int(value)` where it is stored",
        )  # fmt: skip
    proxies = {symbol: fx.Proxy(env[symbol], tracer) for symbol in expression.free_symbols}
    try:
        built = sympy_interp(_Calls, proxies, expression)
    except (AttributeError, KeyError, NotImplementedError, TypeError, fx.proxy.TraceError) as error:
        raise _refusal(
            user, f"`{expression}`", "which has no form in a graph",
            "compute it of whole numbers (`//` in the place of `/`), or put the line into an opaque operator",
        ) from error  # fmt: skip
    if not isinstance(built, fx.Proxy):
        return built
    mark_number(built.node)
    return built.node


def mark_number(node: fx.Node) -> None:
    """Mark the nodes that compute a number, so that the split can make them anew wherever they are used."""
    if node.op == "call_function" and "number" not in node.meta and not _is_tensor(node):
        node.meta["number"] = True
        for inner in node.all_input_nodes:
            mark_number(inner)


def _is_tensor(node: fx.Node) -> bool:
    return "defines" in node.meta or any(
        isinstance(inner.meta.get("example_value"), torch.Tensor) for inner in (node, *node.all_input_nodes)
    )


def _refusal(user: fx.Node, what: str, why: str, hint: str) -> TraceError:
    line = line_of(user)
    return TraceError(
        f"the model computes with {what}{at(line)} {why}", hint=hint, facts={"file": line[0], "line": line[1]}
    )


def _call(function: Callable[..., Any], *given: Any) -> Any:
    proxy = next((value for value in given if isinstance(value, fx.Proxy)), None)
    return function(*given) if proxy is None else proxy.tracer.create_proxy("call_function", function, given, {})


class _Calls(PythonReferenceAnalysis):
    """Torch's reading of expressions as Python, where functions that take no proxy are called in the graph."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.trunc, x)

    @staticmethod
    def round_to_int(a: Any, dtype: Any) -> Any:
        return _call(round, a)

    @staticmethod
    def round_decimal(a: Any, b: Any) -> Any:
        return _call(round, a, b)

    @staticmethod
    def floor(x: Any) -> Any:
        return _call(torch.sym_float, _call(math.floor, x))

    @staticmethod
    def ceil(x: Any) -> Any:
        return _call(torch.sym_float, _call(math.ceil, x))
