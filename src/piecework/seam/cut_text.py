"""Cut the text that a compiler made of a whole graph at its opaque calls, into regions as a split graph has them.

The text is a list of statements in order. Each run of statements between two opaque calls becomes a function of its
own, with what it reads of earlier ones as parameters. What makes no kernel (an allocation, a view, a size) is done in
front of the opaque calls that it stands among, so that only the calls themselves are made one by one.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from piecework.seam import vocabulary as words
from piecework.values.graph import OPAQUE, PIECE
from piecework.values.syntax import parse_python

_PURE = words.SCALAR_FUNCTIONS | {"math_" + name for name in words.MATH_FUNCTIONS}


@dataclass(frozen=True)
class TextRegion:
    """One region: statements, what they take and what of them is needed later; `operators` are those called, in order.

    `arguments` and `results` are names of the whole text; a result of the whole text is named `result_0`, ….
    """

    kind: str
    lines: tuple[str, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    operators: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The region as a function named `region`, which returns a tuple of its results."""
        returned = f"return ({', '.join(self.results)}{',' if len(self.results) == 1 else ''})"
        return "\n    ".join([f"def region({', '.join(self.arguments)}):", *self.lines, returned]) + "\n"


@dataclass
class _Open:
    """A region in the making."""

    kind: str
    statements: list[ast.stmt] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)


def cut_text(text: str, opaque: Mapping[str, str]) -> tuple[TextRegion, ...]:
    """Cut a compiled text; `opaque` maps the globals that are opaque operators to their qualified names."""
    function = next(s for s in parse_python(text).body if isinstance(s, ast.FunctionDef) and s.name != "prepare")
    cutter = _Cutter(opaque)
    for statement in function.body:
        cutter.take(statement)
    parameters = [argument.arg for argument in function.args.args]
    return tuple(_closed([each for each in cutter.regions if each.statements], parameters))


def release_early(text: str) -> str:
    """Let go of what a compiled text holds to its end after its last use: what may not be written over may be freed."""
    module = parse_python(text)
    function = next(s for s in module.body if isinstance(s, ast.FunctionDef) and s.name == "call")
    freed = {t.id for s in function.body if isinstance(s, ast.Delete) for t in s.targets if isinstance(t, ast.Name)}
    own = _assigned(function.body) - freed - {argument.arg for argument in function.args.args}
    last = {name: i for i, s in enumerate(function.body) for name in (_names(s) | _assigned([s])) & own}
    body: list[ast.stmt] = []
    for index, statement in enumerate(function.body):
        body.append(statement)
        gone = sorted(name for name, where in last.items() if where == index)
        if gone and index < len(function.body) - 1:
            body.append(ast.Delete([ast.Name(name, ast.Del()) for name in gone]))
    function.body = body
    lines = text.splitlines()[: function.lineno - 1]
    return "\n".join([*lines, ast.unparse(ast.fix_missing_locations(function))]) + "\n"


class _Cutter:
    """Sorts statements into regions."""

    def __init__(self, opaque: Mapping[str, str]) -> None:
        self.regions: list[_Open] = []
        self._opaque = opaque
        self._made = 0
        self._after: list[ast.stmt] = []  # made of opaque results, and not yet known to be for another opaque call

    def take(self, statement: ast.stmt) -> None:
        operator = self._operator(statement)
        last = self.regions[-1] if self.regions else None
        if isinstance(statement, ast.Delete):
            return  # names end with their region, and are held between regions for as long as they are needed
        if operator:
            self._take_call(statement, operator)
        elif last is None or last.kind == PIECE:
            self._add(self._piece(), statement)
        elif _is_bare_return(statement) and not self._after:
            self._add(last, statement)
        elif _is_item(statement, last.defined) and not self._after:
            self._add(last, statement)  # a tuple is taken apart where it is made
        elif _is_pure(statement):
            if _names(statement) & (last.defined | _assigned(self._after)):
                self._after.append(statement)
            else:
                self._add(self._before(), statement)
        else:
            self._add(self._piece(), statement)

    def _take_call(self, statement: ast.stmt, operator: str) -> None:
        last = self.regions[-1] if self.regions else None
        if last is None or last.kind == PIECE:
            last = _Open(OPAQUE)
            self.regions.append(last)
        waiting, self._after = self._after, []
        for each in waiting:
            self._add(last, each)
        lift = _Lift(last.defined, self._made)
        statement = lift.visit(statement)
        self._made += len(lift.lifted)
        for view in lift.lifted:
            self._add(self._before(), view)
        self._add(last, statement)
        last.operators.append(operator)

    def _piece(self) -> _Open:
        """Return the piece that goes on, or begin the one after an opaque region."""
        if not self.regions or self.regions[-1].kind == OPAQUE:
            self.regions.append(_Open(PIECE))
            waiting, self._after = self._after, []
            for each in waiting:
                self._add(self.regions[-1], each)
        return self.regions[-1]

    def _before(self) -> _Open:
        """Return the piece in front of the opaque region that is being filled."""
        if len(self.regions) < 2:
            self.regions.insert(0, _Open(PIECE))
        return self.regions[-2]

    def _add(self, region: _Open, statement: ast.stmt) -> None:
        region.statements.append(statement)
        region.defined |= _assigned([statement])

    def _operator(self, statement: ast.stmt) -> str:
        value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
        return self._opaque.get(value.func.id, "") if is_call else ""  # type: ignore[union-attr]


class _Lift(ast.NodeTransformer):
    """Take views out of an opaque call's arguments, where what they are views of is there before the call."""

    def __init__(self, defined: Collection[str], first: int) -> None:
        self._defined = defined
        self._first = first
        self.lifted: list[ast.stmt] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == words.VIEW and not _names(node) & set(self._defined):
            name = f"view_{self._first + len(self.lifted)}_"
            self.lifted.append(ast.Assign([ast.Name(name, ast.Store())], node, lineno=0))
            return ast.Name(name, ast.Load())
        self.generic_visit(node)
        return node


def _closed(regions: Sequence[_Open], parameters: Sequence[str]) -> Iterator[TextRegion]:
    """Say of each region what it takes from before it, and what of it is needed after it."""
    needed: set[str] = set()
    later: list[set[str]] = []
    for region in reversed(regions):
        later.append(set(needed))
        for statement in reversed(region.statements):
            needed = (needed - _assigned([statement])) | _names(statement)
    known = dict.fromkeys(parameters)
    for region, after in zip(regions, reversed(later), strict=True):
        made: dict[str, None] = {}
        taken: dict[str, None] = {}
        lines: list[tuple[str, set[str]]] = []
        results: list[str] = []
        for statement in region.statements:
            taken |= dict.fromkeys(n for n in _in_order(statement) if n in known and n not in made)
            if isinstance(statement, ast.Return):
                items = statement.value.elts if isinstance(statement.value, ast.Tuple) else []
                results += [f"result_{index}" for index in range(len(items))]
                lines += [(f"result_{index} = {ast.unparse(item)}", _names(item)) for index, item in enumerate(items)]
                continue
            made |= dict.fromkeys(sorted(_assigned([statement])))
            lines.append(
                (ast.unparse(ast.fix_missing_locations(statement)), _names(statement) | _assigned([statement]))
            )
        results += [name for name in made if name in after and name not in results]
        known |= made
        kept = tuple(_with_releases(lines, made.keys() - set(results)))
        yield TextRegion(region.kind, kept, tuple(taken), tuple(results), tuple(region.operators))


def _with_releases(lines: Sequence[tuple[str, set[str]]], own: Collection[str]) -> Iterator[str]:
    """Let go of each of a region's own names after its last use."""
    last = {name: index for index, (_, names) in enumerate(lines) for name in names if name in own}
    for index, (line, _) in enumerate(lines):
        yield line
        gone = sorted(name for name, where in last.items() if where == index)
        if gone and index < len(lines) - 1:
            yield f"del {', '.join(gone)}"


def _is_bare_return(statement: ast.stmt) -> bool:
    """Tell whether nothing is left to do but to return values that are there."""
    match statement:
        case ast.Return(value=ast.Tuple(elts=items)):
            return all(isinstance(item, ast.Name) for item in items)
    return False


def _is_item(statement: ast.stmt, defined: Collection[str]) -> bool:
    """Tell whether a statement takes one item of a tuple that an opaque call gave."""
    match statement:
        case ast.Assign(value=ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int()))):
            return name in defined
        case ast.Assign(value=ast.Call(func=ast.Name(id=f), args=[ast.Name(id=name), ast.Constant(value=int())])):
            return f.endswith("_getitem") and name in defined
    return False


def _is_pure(statement: ast.stmt) -> bool:
    """Tell whether a statement makes no kernel: it allocates, views, renames or computes a size."""
    return isinstance(statement, ast.Assign) and _is_light(statement.value)


def _is_light(node: ast.expr) -> bool:
    match node:
        case ast.Name() | ast.Constant() | ast.Attribute():
            return True
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            known = name in words.ALLOCATORS or name == words.VIEW or name in _PURE
            return known and all(map(_is_light, args)) and all(_is_light(each.value) for each in keywords)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return all(map(_is_light, items))
        case ast.UnaryOp(operand=operand):
            return _is_light(operand)
        case ast.BinOp(left=left, right=right):
            return _is_light(left) and _is_light(right)
    return False


def _assigned(statements: Sequence[ast.stmt]) -> set[str]:
    return {t.id for s in statements if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}


def _names(node: ast.AST) -> set[str]:
    return set(_in_order(node))


def _in_order(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]
