"""Conditions on sizes as text, evaluated without running them: at many sizes at once, or by intervals.

The text is Python over size names as the trace prints it: whole-number arithmetic, comparisons, `and`, `or`, `not`,
`min`, `max`, `abs` and `math.floor`, `math.ceil`, `math.trunc`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from typing import Any

from piecework.values.syntax import parse_python

Interval = tuple[float, float]
_MODULES = ("math", "torch")

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


class UnknownExpression(ValueError):
    """The text holds something whose meaning is not known here."""


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """Parse a condition; raise UnknownExpression where it is no expression."""
    try:
        return parse_python(text, "eval").body
    except SyntaxError as error:
        raise UnknownExpression(text) from error


def names_in(text: str) -> tuple[str, ...]:
    """Return the size names of a condition, in order of first use."""
    called = {id(node.func) for node in ast.walk(parse(text)) if isinstance(node, ast.Call)}
    places = [node for node in ast.walk(parse(text)) if isinstance(node, ast.Name) and node.id not in _MODULES]
    names = [node for node in places if id(node) not in called]
    return tuple(dict.fromkeys(node.id for node in sorted(names, key=lambda node: node.col_offset)))


def evaluate(text: str, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Evaluate a condition where names stand for numbers, or for arrays of them if `functions` take arrays."""

    def visit(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() as value):
                return value
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
                arithmetic = functions["/"] if isinstance(sign, ast.Div) else _ARITHMETIC[type(sign)]
                return arithmetic(visit(left), visit(right))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -visit(inner)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return functions["not"](visit(inner))
            case ast.BoolOp(op=sign, values=parts):
                return reduce(functions["and" if isinstance(sign, ast.And) else "or"], map(visit, parts))
            case ast.Compare(left=left, ops=signs, comparators=others):
                sides = [visit(left), *map(visit, others)]
                compare = functions.get("compare", lambda sign, a, b: sign(a, b))
                pairs = [compare(_COMPARISONS[type(s)], a, b) for s, a, b in zip(signs, sides, sides[1:], strict=False)]
                return reduce(functions["and"], pairs)
            case ast.Call(func=function, args=arguments, keywords=[]):
                name = ast.unparse(function)
                if name in ("min", "max"):
                    return reduce(functions[name], [visit(a) for a in arguments])
                if name in functions and len(arguments) == 1:
                    return functions[name](visit(arguments[0]))
        raise UnknownExpression(ast.unparse(node))

    return visit(parse(text))


NUMBERS: Mapping[str, Callable[..., Any]] = {
    "and": lambda a, b: bool(a and b), "or": lambda a, b: bool(a or b), "not": lambda a: not a, "min": min,
    "max": max, "abs": abs, "math.floor": math.floor, "math.ceil": math.ceil, "math.trunc": math.trunc,
    "int": int, "float": float, "torch.sym_float": float, "round": round, "math.log2": math.log2,
    "math.sqrt": math.sqrt, "/": operator.truediv,
}  # fmt: skip
_TO_WHOLE = {"math.floor", "math.ceil", "math.trunc", "int", "round"}
_ROUNDING = {"math.log2", "math.sqrt"}


def is_exact(text: str) -> bool:
    """Tell whether no step of a condition rounds a float that is computed with: then its truth is certain everywhere.

    A quotient of whole numbers that is compared, or made whole, counts as exact: it is rounded once, and rightly.
    """
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.BinOp) and (_is_float(node.left) or _is_float(node.right)):
            return False
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _ROUNDING:
            return False
    return True


def _is_float(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, float)
        case ast.BinOp(left=left, op=sign, right=right):
            return isinstance(sign, ast.Div) or _is_float(left) or _is_float(right)
        case ast.UnaryOp(operand=inner):
            return _is_float(inner)
        case ast.Call(func=function, args=arguments):
            name = ast.unparse(function)
            is_whole = name in _TO_WHOLE and len(arguments) == 1
            return not is_whole and (name not in ("min", "max", "abs") or any(map(_is_float, arguments)))
    return False


def holds_by_intervals(text: str, bounds: Mapping[str, Interval]) -> bool:
    """Tell whether a condition follows for all sizes within `bounds` from the ends of intervals alone."""
    try:
        return _truth(parse(text), bounds) is True
    except (UnknownExpression, ZeroDivisionError, OverflowError):
        return False


def _truth(node: ast.expr, bounds: Mapping[str, Interval]) -> bool | None:
    match node:
        case ast.Constant(value=bool() as value):
            return value
        case ast.BoolOp(op=sign, values=parts):
            known = [_truth(part, bounds) for part in parts]
            wanted = not isinstance(sign, ast.And)
            return wanted if wanted in known else (None if None in known else not wanted)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            truth = _truth(inner, bounds)
            return None if truth is None else not truth
        case ast.Compare(left=left, ops=signs, comparators=others):
            sides = [_interval(left, bounds), *(_interval(other, bounds) for other in others)]
            found = [_compare(s, a, b) for s, a, b in zip(signs, sides, sides[1:], strict=False)]
            return False if False in found else (None if None in found else True)
    raise UnknownExpression(ast.unparse(node))


def _compare(sign: ast.cmpop, one: Interval, two: Interval) -> bool | None:
    match sign:
        case ast.Lt():
            return True if one[1] < two[0] else (False if one[0] >= two[1] else None)
        case ast.LtE():
            return True if one[1] <= two[0] else (False if one[0] > two[1] else None)
        case ast.Gt():
            return _compare(ast.Lt(), two, one)
        case ast.GtE():
            return _compare(ast.LtE(), two, one)
        case ast.Eq() | ast.NotEq():
            apart = one[1] < two[0] or two[1] < one[0]
            same = one == two and one[0] == one[1]
            known = False if apart else (True if same else None)
            return known if known is None or isinstance(sign, ast.Eq) else not known
    return None


def _interval(node: ast.expr, bounds: Mapping[str, Interval]) -> Interval:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value, value
        case ast.Name(id=name) if name in bounds:
            return bounds[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            low, high = _interval(inner, bounds)
            return -high, -low
        case ast.BinOp(left=left, op=sign, right=right):
            return _combine(sign, _interval(left, bounds), _interval(right, bounds))
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments):
            ends = [_interval(argument, bounds) for argument in arguments]
            choose = min if name == "min" else max
            return choose(low for low, _ in ends), choose(high for _, high in ends)
    raise UnknownExpression(ast.unparse(node))


def _combine(sign: ast.operator, one: Interval, two: Interval) -> Interval:
    match sign:
        case ast.Add():
            return one[0] + two[0], one[1] + two[1]
        case ast.Sub():
            return one[0] - two[1], one[1] - two[0]
        case ast.Mult():
            ends = [a * b for a in one for b in two]
            return min(ends), max(ends)
        case ast.FloorDiv() if two[0] > 0:
            ends = [a // b for a in one for b in two]
            return min(ends), max(ends)
        case ast.Mod() if two[0] > 0 and one[0] >= 0:
            return (0, min(one[1], two[1] - 1)) if one[1] >= two[0] else one
    raise UnknownExpression(type(sign).__name__)
