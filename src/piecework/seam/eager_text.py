"""Make piece text runnable as it is: the code that the eager compiler's artifacts run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch

from piecework.errors import CorruptEntry
from piecework.seam.names import find
from piecework.values.syntax import parse_python


def prepare_text(text: str) -> tuple[CodeType, dict[str, Any], tuple[str, ...]]:
    """Return the code of a piece's text, the globals it needs, and its weights' names.

    The text is held to its grammar: assignments of calls, and one return. Functions are found once instead of at every
    call; weights become globals; a value is deleted after its last use, so that its memory is free as early as can be.
    """
    function, names, weights = _prepare(text)
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "<piece>", "exec"), names)
    return names[function.name].__code__, names, weights


def prepared_source(text: str) -> str:
    """Return what `prepare_text` makes code of, as text over the same globals."""
    return ast.unparse(ast.fix_missing_locations(_prepare(text)[0])) + "\n"


def prepared_names(text: str) -> dict[str, Any]:
    """Return the globals that `prepare_text` gives to the code."""
    return _prepare(text)[1]


def _prepare(text: str) -> tuple[ast.FunctionDef, dict[str, Any], tuple[str, ...]]:
    tree = parse_python(text)
    function = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(function, ast.FunctionDef):
        raise CorruptEntry("piece text holds something other than one function")
    weights = tuple(a.arg for a in function.args.args if _is_weight(a))
    names: dict[str, Any] = {"torch": torch}
    hoist = _Hoist({a.arg for a in function.args.args}, names)
    body = [hoist.statement(statement) for statement in function.body]
    function.args.args = [a for a in function.args.args if a.arg not in weights]
    for argument in function.args.args:
        argument.annotation = None
    function.body = _free_early(body, {a.arg for a in function.args.args})
    return function, names, weights


def _is_weight(argument: ast.arg) -> bool:
    note = argument.annotation
    return isinstance(note, ast.Constant) and str(note.value).startswith("weight ")


class _Hoist(ast.NodeTransformer):
    """Replace each function that is called by a global that holds it; refuse what is not in the grammar."""

    def __init__(self, known: set[str], names: dict[str, Any]) -> None:
        self.known = known
        self.names = names
        self.paths: dict[str, str] = {}

    def statement(self, statement: ast.stmt) -> ast.stmt:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
                result = self.visit(statement)
                self.known.add(name)
            case ast.Return(value=ast.Tuple()):
                result = self.visit(statement)
            case _:
                raise CorruptEntry(f"piece text has a statement outside its grammar: `{ast.unparse(statement)}`")
        return result  # type: ignore[no-any-return]

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Attribute):
            receiver = node.func.value
            is_method = isinstance(receiver, ast.Name) and receiver.id in self.known
            path = ast.unparse(node.func)
            if not is_method and path != "torch.device":
                node.func = ast.Name(id=self._global(path), ctx=ast.Load())
        elif not (isinstance(node.func, ast.Name) and node.func.id in ("slice", "float", "complex")):
            raise CorruptEntry(f"piece text calls something without a qualified name: `{ast.unparse(node)}`")
        self.generic_visit(node)
        return node

    def _global(self, path: str) -> str:
        if path not in self.paths:
            self.paths[path] = f"f{len(self.paths)}_{path.rpartition('.')[2]}"
            self.names[self.paths[path]] = find(path)
        return self.paths[path]


def _free_early(body: Sequence[ast.stmt], parameters: set[str]) -> list[ast.stmt]:
    """Put a `del` behind the last use of each value that does not leave the piece."""
    last: dict[str, int] = {}
    for index, statement in enumerate(body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                last[node.id] = index
    assigned = {t.id for s in body if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
    result: list[ast.stmt] = []
    for index, statement in enumerate(body):
        result.append(statement)
        done = [name for name in sorted(assigned - parameters) if last[name] == index]
        if done and not isinstance(statement, ast.Return):
            result.append(ast.Delete(targets=[ast.Name(id=name, ctx=ast.Del()) for name in done]))
    return result
