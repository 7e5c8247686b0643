"""Sizes as expressions over declared names: rename symbols, print them, and rebuild them in the graph.

After `use_symbols` no size object stands in the graph any more: every whole number that depends on a
size is computed by nodes over one placeholder per declared name, so sizes never cross a cut.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from piecework.seam.number_calls import as_function, build_number, is_whole, mark_number
from piecework.values.signature import ScalarSpec, Size, Spec, TensorSpec, contiguous_stride

_DROPPED = ("_log_api_usage_once",)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (int, float, bool, *_SYMBOLIC)


class SymbolTable:
    """The names of symbols, and expressions as text; `declared` maps Dynamo's symbols to declared names.

    `names` holds besides `u0, u1, …` for the sizes that are known at run time only.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str]) -> None:
        self.names = dict(names)
        self.declared = dict(names)
        self._text: dict[sympy.Expr, Size] = {}

    def size(self, value: Any) -> Size:
        """Return a size as a whole number or as text over the declared names."""
        if type(value) is int:
            return value
        expression = self.expression(value)
        text = self._text.get(expression)
        if text is None:
            text = self._text[expression] = self._print(expression)
        return text

    def expression(self, value: Any) -> sympy.Expr:
        """Return the sympy expression of a symbolic number."""
        return (
            value.node.expr
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            else sympy.sympify(value)
        )

    def text(self, expression: sympy.Expr) -> Size:
        """Return a sympy expression as text over the declared names."""
        return self._print(expression)

    def _print(self, expression: sympy.Expr) -> Size:
        if expression.is_Integer:
            return int(expression)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.names:
                self.names[symbol] = (
                    f"u{sum(1 for name in self.names.values() if name[0] == 'u' and name[1:].isdigit())}"
                )
        renamed = expression.xreplace({s: sympy.Symbol(self.names[s], integer=True) for s in expression.free_symbols})
        return python_text(renamed)

    def spec(self, value: Any) -> Spec | tuple[Spec, ...]:
        """Return the spec of a traced value: a tensor, a number, or a tuple of them."""
        if isinstance(value, torch.Tensor):
            shape = tuple(self.size(size) for size in value.shape)
            stride = tuple(self.size(step) for step in value.stride())
            return TensorSpec(
                _dtype(value.dtype), shape, None if self._is_contiguous(value, stride) else stride, value.device.type
            )
        if isinstance(value, tuple | list):
            return tuple(self.spec(item) for item in value)  # type: ignore[misc]
        if isinstance(value, bool | torch.SymBool):
            return ScalarSpec("bool")
        if isinstance(value, float | torch.SymFloat):
            return ScalarSpec("float")
        return ScalarSpec("int")

    def _is_contiguous(self, value: torch.Tensor, stride: tuple[Size, ...]) -> bool:
        if all(type(size) is int for size in value.shape):
            return stride == contiguous_stride(value.shape)
        step: Any = 1
        for size, own in zip(reversed(value.shape), reversed(value.stride()), strict=True):
            if _any_size(self.expression(own)) != _any_size(self.expression(step)):
                return False
            step = step * size
        return True


def _any_size(expression: Any) -> Any:
    """Leave out of a stride that a size of 0 counts as 1: such a tensor holds nothing, however it lies."""
    if not hasattr(expression, "replace"):
        return expression
    return expression.replace(
        lambda part: part.func.__name__ == "Max" and len(part.args) == 2 and 1 in part.args,
        lambda part: next(each for each in part.args if each != 1),
    )


def python_text(expression: Any) -> str:
    """Write a sympy expression as Python that names public functions alone, as text that is kept must."""
    return str(PythonPrinter().doprint(expression)).replace("torch._sym_sqrt(", "math.sqrt(")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_number(value: Any) -> bool:
    """Tell whether a traced value is a number or a tuple of sizes, as opposed to holding tensors."""
    if isinstance(value, tuple | list):
        return all(is_number(item) for item in value) and len(value) > 0
    return isinstance(value, _NUMBERS)


def use_symbols(graph: fx.Graph, table: SymbolTable) -> dict[str, fx.Node]:
    """Rewrite `graph` in place so that sizes are computed from symbol placeholders; return those by name."""
    first = next(iter(graph.nodes))
    placeholders: dict[str, fx.Node] = {}
    env: dict[sympy.Symbol, fx.Node] = {}
    kept: set[fx.Node] = set()
    with graph.inserting_before(first):
        for symbol, name in table.declared.items():
            if name not in placeholders:
                placeholders[name] = graph.placeholder(name)
                placeholders[name].meta |= {"example_value": None, "symbol": (name, symbol)}
            env[symbol] = placeholders[name]
    memo: dict[sympy.Expr, Any] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        if any(is_number(inner.meta.get("example_value")) for inner in node.all_input_nodes):
            _replace_inputs(graph, node, table, env, memo, kept)
        _define_unbacked(graph, node, env, table)
        value = node.meta.get("example_value")
        if isinstance(value, _SYMBOLIC) and node.op != "output" and not is_whole(table.expression(value)):
            as_function(node)
            kept.add(node)
            memo[table.expression(value)] = node
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "placeholder"
            and node not in placeholders.values()
            and not isinstance(node.meta.get("example_value"), torch.Tensor)
        ):
            if not node.users:
                graph.erase_node(node)
            continue
        value = node.meta.get("example_value")
        dropped = node.op == "call_function" and getattr(node.target, "__name__", "") in _DROPPED
        dead_number = node.op not in ("output", "placeholder") and not node.users and is_number(value)
        dead_number = dead_number and "defines" not in node.meta
        if dropped or (dead_number and not (node.op == "call_function" and "check" in str(node.target))):
            graph.erase_node(node)
    return placeholders


def _replace_inputs(
    graph: fx.Graph,
    node: fx.Node,
    table: SymbolTable,
    env: dict[sympy.Symbol, fx.Node],
    memo: dict[sympy.Expr, Any],
    kept: Collection[fx.Node],
) -> None:
    def build(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return (
                type(value)(build(item) for item in value) if type(value) in (tuple, list) else tuple(map(build, value))
            )
        if isinstance(value, int | float | bool):
            return value
        expression = table.expression(value)
        if expression not in memo:
            with graph.inserting_before(node):
                memo[expression] = build_number(graph, expression, env, node)
        return memo[expression]

    def resolve(inner: fx.Node) -> Any:
        value = inner.meta.get("example_value")
        if not is_number(value) or _is_definition(inner, env):
            return inner
        if inner in kept:
            mark_number(inner)
            return inner
        return build(value)

    is_size_call = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
    if is_size_call and is_number(node.meta.get("example_value")):
        return
    node.args = fx.map_arg(node.args, resolve)
    node.kwargs = fx.map_arg(node.kwargs, resolve)


def _is_definition(node: fx.Node, env: Mapping[sympy.Symbol, fx.Node]) -> bool:
    return node in env.values()


def _define_unbacked(graph: fx.Graph, node: fx.Node, env: dict[sympy.Symbol, fx.Node], table: SymbolTable) -> None:
    """Give every data-dependent symbol that `node` brings a node of its own."""
    value = node.meta.get("example_value")
    bindings = node.meta.get("unbacked_bindings") or {}
    for symbol in bindings:
        if symbol in env:
            continue
        made = node if isinstance(value, torch.SymInt) else _reach(graph, node, value, bindings[symbol])
        if made is not None:
            env[symbol] = made
            made.meta["defines"] = table.text(symbol)
            made.meta.setdefault("spec", ScalarSpec("int"))


def _reach(graph: fx.Graph, node: fx.Node, value: Any, path: Sequence[Any]) -> fx.Node | None:
    """Write the calls that read a data-dependent number off a node's value, by torch's own path to it."""
    steps = list(path)
    while steps:
        step = steps.pop(0)
        name, position = getattr(step, "name", None), getattr(step, "idx", None)
        with graph.inserting_after(node):
            if name in ("size", "stride") and steps and hasattr(steps[0], "idx"):
                dim = steps.pop(0).idx
                node, value = graph.call_method(name, (node, dim)), getattr(value, name)(dim)
            elif name == "storage_offset":
                node, value = graph.call_method(name, (node,)), value.storage_offset()
            elif position is not None and isinstance(value, tuple | list):
                node, value = _item(graph, node, position), value[position]
            else:
                return None
        node.meta.setdefault("example_value", value)
    return node


def _item(graph: fx.Graph, node: fx.Node, position: int) -> fx.Node:
    """Return the one node that reads this item, right behind the call: its sizes may be asked for before its uses."""
    found, *again = [user for user in node.users if user.target is operator.getitem and user.args[1] == position] or [
        graph.call_function(operator.getitem, (node, position))
    ]
    node.append(found)
    for other in again:  # torch reads an item once more for what it asserts of its sizes
        other.replace_all_uses_with(found)
        graph.erase_node(other)
    return found
