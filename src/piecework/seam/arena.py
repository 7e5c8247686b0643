"""Run a piece for one size without allocating: what depends on sizes and weights alone is evaluated once.

Two thirds of a small call are allocations and views. For sizes that are known, buffers are allocated once and their
views made once; what is left are the calls of kernels. Buffers that never leave the piece are shared by all its sites;
outputs stay in memory of their site until its next call, but for those that are asked for fresh.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

from piecework.seam import vocabulary as words
from piecework.values.syntax import parse_python

_ALLOCATE = "empty_strided_cpu"
_PURE = words.SCALAR_FUNCTIONS | {"math_" + name for name in words.MATH_FUNCTIONS}


@dataclass(frozen=True)
class StaticCode:
    """A call split in three: buffers that stay inside, what else is evaluated once, and what runs every time.

    `outputs` are expressions over the names set once, empty where an output is made anew by each call.
    """

    fresh: frozenset[int]
    outputs: tuple[str, ...]
    inside: CodeType
    once: CodeType
    hot: CodeType


def split_static(
    text: str, symbols: Sequence[str], fresh: Collection[int], given: Sequence[str] = ()
) -> StaticCode | None:
    """Split the `call` of a stripped text; None where it holds something that cannot be told apart safely.

    `symbols` are parameters whose values are known, `fresh` the outputs that must be new at every call, and `given`
    activations that are the same tensor at every call.
    """
    module = parse_python(text)
    call = next(s for s in module.body if isinstance(s, ast.FunctionDef) and s.name == "call")
    names = _assigned(call.body)
    if len(set(names)) != len(names):
        return None  # a name with two meanings: before and after cannot be told apart by the name alone
    known = {t.id for s in module.body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
    roots = _roots(call.body)
    leaves = _returned(call.body)
    new = {root for index, item in enumerate(leaves) if index in fresh for root in _roots_of(item, roots)}
    out = {root for item in leaves for root in _roots_of(item, roots)}
    parameters = {argument.arg for argument in call.args.args}
    split = _Split(set(symbols), parameters - {*symbols, *given}, known, new, out)
    for statement in call.body:
        split.take(statement)
    outputs = tuple(ast.unparse(item) if split.is_static(item) else "" for item in leaves)
    call.body = split.hot
    return StaticCode(frozenset(fresh), outputs, _compile(split.inside), _compile(split.once), _compile([call]))


def _compile(statements: list[ast.stmt]) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Module(statements, [])), "<piece>", "exec")


def _assigned(body: Sequence[ast.stmt]) -> list[str]:
    return [t.id for s in body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)]


def _returned(body: Sequence[ast.stmt]) -> list[ast.expr]:
    last = body[-1]
    return list(last.value.elts) if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple) else []


def _roots(body: Sequence[ast.stmt]) -> dict[str, set[str]]:
    """Return for each name the allocations whose memory it may share."""
    roots: dict[str, set[str]] = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            is_new = isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) == _ALLOCATE
            roots[name] = {name} if is_new else _roots_of(statement.value, roots)
    return roots


def _roots_of(expression: ast.expr, roots: Mapping[str, set[str]]) -> set[str]:
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    return {root for name in names for root in roots.get(name, ())}


class _Split:
    """Sort statements into those for once and those for every call."""

    def __init__(
        self, symbols: set[str], dynamic: set[str], known: set[str], new: set[str], out: set[str]
    ) -> None:
        self.static = symbols | known
        self.dynamic = dynamic
        self.sizes = set(symbols)
        self.new = new
        self.out = out
        self.inside: list[ast.stmt] = []
        self.once: list[ast.stmt] = []
        self.hot: list[ast.stmt] = []

    def take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name not in self.new and self.is_static(value):
                    self.static.add(name)
                    (self.inside if self._is_inside(name, value) else self.once).append(statement)
                else:
                    self.dynamic.add(name)
                    self.hot.append(self._lift(statement))
            case ast.Delete(targets=targets):
                kept: list[ast.expr] = [t for t in targets if isinstance(t, ast.Name) and t.id not in self.static]
                if kept:
                    self.hot.append(ast.Delete(targets=kept))
            case _:
                self.hot.append(self._lift(statement))

    def _is_inside(self, name: str, value: ast.expr) -> bool:
        """Tell whether a static value is the same for all sites: a size, or a buffer that does not leave the piece."""
        if _is_allocation(value):
            return name not in self.out
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if names and names <= self.sizes | _PURE:
            self.sizes.add(name)
            return True
        return False

    def is_static(self, node: ast.expr) -> bool:
        """Tell whether an expression depends on sizes, weights and static buffers alone, and does nothing else."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return name in {_ALLOCATE, words.VIEW, *_PURE} and all(map(self.is_static, args))
            case ast.Name(id=name):
                return name not in self.dynamic
            case ast.Constant():
                return True
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return all(map(self.is_static, items))
            case ast.UnaryOp(operand=operand):
                return self.is_static(operand)
            case ast.BinOp(left=left, right=right) | ast.Compare(left=left, comparators=[right]):
                return self.is_static(left) and self.is_static(right)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return all(map(self.is_static, (test, body, orelse)))
        return False

    def _lift(self, statement: ast.stmt) -> ast.stmt:
        return _Lift(self).visit(statement)  # type: ignore[no-any-return]


class _Lift(ast.NodeTransformer):
    """Make static views and sizes that stand inside a hot statement into names that are set once."""

    def __init__(self, split: _Split) -> None:
        self.split = split

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == words.VIEW and self.split.is_static(node):
            return self._named(node)
        self.generic_visit(node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self._named(node) if self.split.is_static(node) else node

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        has_names = any(isinstance(inner, ast.Name) for inner in ast.walk(node))
        if has_names and self.split.is_static(node):
            return self._named(node)
        self.generic_visit(node)
        return node

    def _named(self, node: ast.expr) -> ast.Name:
        name = f"k{len(self.split.once)}_"
        self.split.once.append(ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=node))
        return ast.Name(id=name, ctx=ast.Load())


def _is_allocation(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == _ALLOCATE

