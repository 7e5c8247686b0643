"""Private names of torch, the environment, pickle, `global` and inner imports stand only where they are owned.

Ruff bans the names that its configuration lists. What it cannot say in general is checked here on the syntax tree:
any private part of a name under torch, reading `os.environ` through any spelling, imports inside functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.source_tree import PACKAGE, dotted, package_files, parse, python_files, short

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "_pickle"}
# `torch.ops` is a namespace of operators: a private operator there is still reached by a public path.
PUBLIC_NAMESPACES = ("torch.ops.",)


def is_in(path: Path, *owners: str) -> bool:
    """Tell whether a file is one of the owners, or stands in one that is a folder of the package."""
    return any(path == PACKAGE / owner or PACKAGE / owner in path.parents for owner in owners)


def is_private_torch(name: str) -> bool:
    """Tell whether a dotted name reaches what torch does not publish, or symbolic shapes' experimental home."""
    parts = name.split(".")
    if parts[0] != "torch" or name.startswith(PUBLIC_NAMESPACES):
        return False
    private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
    return private or name.startswith("torch.fx.experimental")


def imported_names(node: ast.AST) -> Iterator[str]:
    """Go through the full names that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def aliases(tree: ast.Module) -> dict[str, str]:
    """Map each name that a module binds by importing to what it stands for."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return bound


def names_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Go through every imported or accessed name that starts at a module, in full, with its line."""
    bound = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported_names(node))
        elif isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            if first in bound:
                yield node.lineno, f"{bound[first]}.{rest}"
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
            target = dotted(node.args[0]) if node.args else ""
            first, _, rest = target.partition(".")
            if first in bound and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield node.lineno, ".".join(filter(None, (bound[first], rest, str(node.args[1].value))))


def offences(paths: list[Path], is_banned, *owners: str) -> set[str]:  # type: ignore[no-untyped-def]
    """List the uses of banned names outside their owners."""
    return {
        f"{short(path)}:{line} {name}"
        for path in paths
        if not is_in(path, *owners)
        for line, name in names_used(parse(path))
        if is_banned(name)
    }


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("import torch\ntorch._dynamo.reset()", True),
        ("import torch as t\nt.fx._symbolic_trace", True),
        ("from torch._inductor import config", True),
        ("from torch import _C", True),
        ("import torch\ngetattr(torch, '_C')", True),
        ("from torch.fx.experimental import symbolic_shapes", True),
        ("import torch\ntorch.__version__\ntorch.ops.aten._softmax", False),
        ("class A:\n  def f(self): return self.torch._x", False),
    ],
)
def test_private_names_are_recognised(source: str, caught: bool) -> None:
    assert any(is_private_torch(name) for _, name in names_used(ast.parse(source))) is caught


def test_private_torch_stands_in_seam_alone() -> None:
    assert offences(package_files(), is_private_torch, "seam") == set()


def test_environment_is_read_in_one_place() -> None:
    def is_environment(name: str) -> bool:
        return name.split(".")[0] == "os" and name.split(".")[-1] in ENVIRONMENT or name.startswith("os.environ.")

    # The loader may set the one variable that compiled kernels need.
    assert offences(package_files(), is_environment, "env.py", "seam") == set()


def test_nothing_is_pickled() -> None:
    assert offences(package_files(), lambda name: name.split(".")[0] in PICKLES, "seam") == set()


def test_nothing_is_patched() -> None:
    everything = python_files()
    assert offences(everything, lambda name: name.startswith("unittest.mock")) == set()


def test_no_global_statement() -> None:
    found = {
        f"{short(path)}:{node.lineno}"
        for path in package_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Global)
    }
    assert found == set()


def test_imports_inside_functions_stand_where_start_up_needs_them() -> None:
    found = {
        f"{short(path)}:{inner.lineno}"
        for path in package_files()
        if not is_in(path, "cli", "seam", "pipeline.py", "api")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    assert found == set()
