"""Reading `Tensors:` blocks: what a docstring says of the tensors that go in and come out."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from house.source_tree import ROOT, Function

NAMES = r"(?P<names>->|\*{0,2}\w+(?:, \*{0,2}\w+)*)"
ENTRY = re.compile(NAMES + r"\s+(?P<shapes>\[[^\]]*\](?:,? \[[^\]]*\])*)\s+(?P<dtype>\w+)")
TENSOR = re.compile(r"\bTensor\b")
DIMENSION = re.compile(r"[A-Za-z]+|\d+|\.\.\.|[+*/()-]|//")
DTYPES = {"model", "any", "bool", "index", *(f"{kind}{bits}" for kind in "iuf" for bits in (8, 16, 32, 64)), "bf16"}


@dataclass(frozen=True)
class Entry:
    """One line of a block: names of arguments (`->` for results), the dimensions of their shapes, their dtype."""

    names: tuple[str, ...]
    dims: tuple[str, ...]
    dtype: str


def known_letters() -> set[str]:
    """Read the dimension letters from the table in docs/dims.md."""
    return set(re.findall(r"^\| ([A-Z]) \|", (ROOT / "docs/dims.md").read_text(), re.MULTILINE))


def block_of(docstring: str) -> list[str] | None:
    """Return the lines of the `Tensors:` block, continuation lines joined; None if there is no block."""
    lines = docstring.splitlines()
    start = next((number for number, line in enumerate(lines) if line.strip() == "Tensors:"), None)
    if start is None:
        return None
    margin = len(lines[start]) - len(lines[start].lstrip())
    entries: list[str] = []
    depth = None
    for line in lines[start + 1 :]:
        indent = len(line) - len(line.lstrip())
        if not line.strip() or indent <= margin:
            break
        depth = indent if depth is None else depth
        if indent > depth and entries:
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    return entries


def parse_entry(line: str) -> Entry | None:
    """Read one line of a block; None if it is not of the form."""
    found = ENTRY.match(line)
    if found is None:
        return None
    dims: list[str] = []
    for shape in re.findall(r"\[([^\]]*)\]", found["shapes"]):
        for dimension in filter(None, (part.strip() for part in shape.split(","))):
            dims += DIMENSION.findall(dimension) if DIMENSION.sub("", dimension).strip() == "" else [dimension]
    names = tuple(name.strip().lstrip("*") for name in found["names"].split(","))
    return Entry(names, tuple(dims), found["dtype"])


def tensor_arguments(function: Function) -> list[str]:
    """List the arguments that a function's annotations call tensors."""
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    annotated = [(argument.arg, ast.unparse(argument.annotation)) for argument in arguments if argument.annotation]
    return [name for name, annotation in annotated if TENSOR.search(annotation)]


def returns_tensor(function: Function) -> bool:
    """Tell whether a function's annotation says that it returns a tensor, alone or among others."""
    return bool(function.returns and TENSOR.search(ast.unparse(function.returns)))


def is_property(function: Function) -> bool:
    """Tell whether a method is read like a field."""
    return any(ast.unparse(mark).split(".")[-1] in ("property", "cached_property") for mark in function.decorator_list)


def told_by_class(docstring: str) -> set[str]:
    """List the fields and properties whose shapes a class's own block gives."""
    entries = [parse_entry(line) for line in block_of(docstring) or []]
    return {name for entry in entries if entry is not None for name in entry.names}


def faults_of(function: Function, letters: set[str], class_docstring: str = "") -> list[str]:
    """List what a function's docstring leaves out or misnames about its tensors; a property's class may say it."""
    if is_property(function) and function.name in told_by_class(class_docstring):
        return []
    arguments = tensor_arguments(function)
    if not arguments and not returns_tensor(function):
        return []
    lines = block_of(ast.get_docstring(function, clean=True) or "")
    if lines is None:
        return ["has no `Tensors:` block"]
    faults: list[str] = []
    told: set[str] = set()
    for line in lines:
        entry = parse_entry(line)
        if entry is None:
            faults.append(f"`{line}` is not `names [shape] dtype …`")
            continue
        told.update(entry.names)
        strange = [dim for dim in entry.dims if dim[0].isalpha() and dim not in letters]
        faults += [f"`{line}` uses `{dim}`, which docs/dims.md does not list" for dim in strange]
        faults += [f"`{dim}` in `{line}` is no dimension" for dim in entry.dims if not DIMENSION.fullmatch(dim)]
        if entry.dtype not in DTYPES:
            faults.append(f"`{line}` has the dtype `{entry.dtype}`, which is none of {', '.join(sorted(DTYPES))}")
    faults += [f"does not tell of `{name}`" for name in arguments if name not in told]
    if returns_tensor(function) and "->" not in told:
        faults.append("does not tell what comes out (`->`)")
    return faults
