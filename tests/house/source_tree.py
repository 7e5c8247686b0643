"""The project's own files, parsed once, for the tests that hold them to the house rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "piecework"
GOLDEN = Path(__file__).resolve().parent / "golden"
PYTHON_FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """List the Python files under the given folders of the project; under all of them if none is given."""
    return sorted(path for folder in folders or PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def package_files() -> list[Path]:
    """List the Python files of the package."""
    return python_files("src")


def short(path: Path) -> str:
    """Write a path as it stands in the project."""
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file of the project."""
    return ast.parse(path.read_text(), filename=str(path))


def functions_of(path: Path) -> Iterator[Function]:
    """Go through every function of a file, methods and inner functions too."""
    for node in ast.walk(parse(path)):
        if isinstance(node, Function):
            yield node


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    """Go through every class of a file."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef):
            yield node


def is_public(name: str) -> bool:
    """Tell whether a name is meant for others; calling an object is."""
    return not name.startswith("_") or name == "__call__"


def public_functions_of(path: Path) -> Iterator[tuple[str, Function, str]]:
    """Go through a file's public functions and its public classes' public methods: name, function, class docstring."""
    for node in parse(path).body:
        if isinstance(node, Function) and is_public(node.name):
            yield node.name, node, ""
        elif isinstance(node, ast.ClassDef) and is_public(node.name):
            for member in node.body:
                if isinstance(member, Function) and is_public(member.name):
                    yield f"{node.name}.{member.name}", member, ast.get_docstring(node) or ""


def dotted(node: ast.expr) -> str:
    """Write a chain of attributes as text: `torch.fx.Node`; empty where it does not start at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
