"""Piece text: print a stretch of a graph as canonical Python, and read it back.

The text is a piece's identity, its hand-over to a worker, its dump and what the eager compiler runs.
Grammar: one function; parameters annotated with specs; assignments `vN = call`; one `return` of a tuple.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecework.errors import TraceError
from piecework.seam.names import find, name_of
from piecework.values.signature import Spec, parse_spec
from piecework.values.syntax import parse_python


@dataclass(frozen=True)
class PieceGraph:
    """A piece read back from its text: parameters with their specs, and the graph over them."""

    parameters: tuple[tuple[str, Spec], ...]
    graph: fx.Graph


def format_value(value: Any, names: Mapping[fx.Node, str]) -> str:
    """Write an argument as Python: a node by its name, a literal by its type and value."""
    kind = type(value)
    if kind is fx.Node:
        return names[value]
    if kind in (int, str, bool) or value is None or value is ...:
        return repr(value) if value is not ... else "..."
    if kind is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if kind is tuple or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        inner = ", ".join(format_value(item, names) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(format_value(item, names) for item in value)}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{format_value(k, names)}: {format_value(v, names)}" for k, v in value.items())
        return f"{{{inner}}}"
    if kind is slice:
        return f"slice({', '.join(format_value(item, names) for item in (value.start, value.stop, value.step))})"
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return str(value)
    if kind is torch.device:
        return f'torch.device("{value.type}")'
    if kind is complex:
        return f"complex({value.real!r}, {value.imag!r})"
    raise TraceError(
        f"an argument of type `{kind.__name__}` cannot stand in a graph: `{value!r}`",
        hint="pass tensors, numbers, strings, dtypes, devices, tuples, lists or dicts to operators",
    )


def format_call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Write the call that a node makes."""
    args = [format_value(arg, names) for arg in node.args]
    words = [f"{key}={format_value(value, names)}" for key, value in sorted(node.kwargs.items())]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:] + words)})"
    return f"{name_of(node.target)}({', '.join(args + words)})"  # type: ignore[arg-type]


def format_piece(
    parameters: Sequence[tuple[fx.Node, str, str]], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> str:
    """Write a piece: `parameters` are (node, name, spec), `nodes` its calls in order, `outputs` what leaves it."""
    names = {node: name for node, name, _ in parameters}
    lines = ["def piece(", *(f'    {name}: "{spec}",' for _, name, spec in parameters), "):"]
    for index, node in enumerate(nodes):
        names[node] = f"v{index}"
        lines.append(f"    v{index} = {format_call(node, names)}")
    inner = ", ".join(names[node] for node in outputs)
    lines.append(f"    return ({inner}{',' if len(outputs) == 1 else ''})")
    return "\n".join(lines) + "\n"


def parse_piece(text: str) -> PieceGraph:
    """Read piece text; refuse with the line whatever is not in the grammar."""
    try:
        tree = parse_python(text)
    except SyntaxError as error:
        raise TraceError(f"piece text is not Python at line {error.lineno}: `{error.msg}`") from error
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise TraceError("piece text must hold exactly one function")
    function = tree.body[0]
    graph, parameters, env = fx.Graph(), [], {}
    for argument in function.args.args:
        if not (isinstance(argument.annotation, ast.Constant) and isinstance(argument.annotation.value, str)):
            raise _refuse(argument, "a parameter without a spec")
        parameters.append((argument.arg, parse_spec(argument.annotation.value)))
        env[argument.arg] = graph.placeholder(argument.arg)
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                env[name] = _parse_call(call, graph, env, name)
            case ast.Return(value=ast.Tuple(elts=items)):
                graph.output(tuple(_parse_value(item, env) for item in items))
            case _:
                raise _refuse(statement, "a statement that is neither a call nor the return of a tuple")
    return PieceGraph(tuple(parameters), graph)


def _refuse(node: ast.AST, what: str) -> TraceError:
    return TraceError(f"piece text has {what} at line {getattr(node, 'lineno', '?')}: `{ast.unparse(node)}`")


def _parse_call(call: ast.Call, graph: fx.Graph, env: Mapping[str, fx.Node], name: str) -> fx.Node:
    if not isinstance(call.func, ast.Attribute):
        raise _refuse(call, "a call of something that has no qualified name")
    args = tuple(_parse_value(arg, env) for arg in call.args)
    words = {word.arg: _parse_value(word.value, env) for word in call.keywords if word.arg}
    receiver = call.func.value
    if isinstance(receiver, ast.Name) and receiver.id in env:
        node = graph.create_node("call_method", call.func.attr, (env[receiver.id], *args), words)
    else:
        node = graph.create_node("call_function", find(ast.unparse(call.func)), args, words)
    node.name = name
    return node


def _parse_value(item: ast.expr, env: Mapping[str, fx.Node]) -> Any:
    match item:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in env:
            return env[name]
        case ast.Tuple(elts=items):
            return tuple(_parse_value(inner, env) for inner in items)
        case ast.List(elts=items):
            return [_parse_value(inner, env) for inner in items]
        case ast.Dict(keys=keys, values=values):
            return {
                _parse_value(k, env): _parse_value(v, env) for k, v in zip(keys, values, strict=True) if k is not None
            }
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if isinstance(value, int | float):
            return -value
        case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
            value = getattr(torch, attr, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
        case ast.Call(func=ast.Name(id="slice"), args=args, keywords=[]):
            return slice(*(_parse_value(arg, env) for arg in args))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value="inf" | "-inf" | "nan" as value)]):
            return float(value)
        case ast.Call(func=ast.Name(id="complex"), args=[real, imaginary]):
            return complex(_parse_value(real, env), _parse_value(imaginary, env))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="device"), args=[ast.Constant(value=kind)]):
            return torch.device(str(kind))
    raise _refuse(item, "a value that is no literal and no name")
