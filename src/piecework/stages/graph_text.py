"""The split graph of a record as Python that runs: one call a region, the pieces and opaque calls as functions above.

It is written beside the record on every cold start, for whoever wants to read what is cut where; nothing reads it back.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from piecework.events import GraphWritten, Observer, StoreWarning
from piecework.store.notes import write_note
from piecework.store.protocol import PROGRAM, Store
from piecework.values.digest import digest_text
from piecework.values.record import Record
from piecework.values.syntax import parse_python
from piecework.values.tree import render

GRAPH_FILE = "computation_graph.py"
_VALUE = re.compile(r"(?<![\w.'\"])w\d+\b")
_WIDTH = 110
_STATIC = ("weight", "buffer", "constant")
_ROOTS = ("torch", "math", "operator")


def computation_graph(key: str, record: Record, pieces: Sequence[str]) -> str:
    """Write the split graph of a record, whose distinct pieces have the texts `pieces`, as a Python module.

    Its function `computation_graph` takes sizes and inputs by their program names and weights by their qualified
    names, and gives what the program gives.
    """
    made = {name for region in record.regions for name in region["results"]}
    made |= {name for region in record.regions for call in region["calls"] for name in _names(call["results"])}
    calls = _OpaqueFunctions(set(record.values) | made)
    body = [_region(region, record, calls) for region in record.regions]
    classes: dict[str, str] = {}
    result = render(dict(record.result), classes)
    parameters = [name for name, b in record.values.items() if b["kind"] in ("symbol", "input")]
    for index, leaf in enumerate(record.inputs):
        if f"argument:{leaf['path']}" in result:
            result = result.replace(f"argument:{leaf['path']}", f"a{index}")
            parameters.append(f"a{index}")
    result = _VALUE.sub(lambda word: _argument(word[0], record), result)
    functions = [_piece_function(number, text, record) for number, text in enumerate(pieces)] + calls.texts()
    main = [
        f"def computation_graph({', '.join([*parameters, 'weights'])}):",
        *(_indent(call) for call in body),
        f"    return {result}",
    ]
    parts = [_head(key, record, len(pieces)), _imports(record, functions, classes), *functions, "\n".join(main)]
    return "\n\n\n".join(parts) + "\n"


def leave_graph(
    key: str, record: Record, pieces: Sequence[str], store: Store, folder: str, observer: Observer
) -> Path | None:
    """Write the split graph beside the record, or into `folder` where one is given; say where."""
    text = computation_graph(key, record, pieces)
    if folder:
        path: Path | None = Path(folder, GRAPH_FILE)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, GRAPH_FILE).write_text(text)
        except OSError as error:
            observer(StoreWarning(path=folder, reason=f"the split graph is not written there: {error.strerror}"))
            return None
    else:
        path = write_note(store, PROGRAM, key, GRAPH_FILE, text)
    if path is not None:
        observer(GraphWritten(path=str(path)))
    return path


def _head(key: str, record: Record, distinct: int) -> str:
    inputs = [f"    {name}: {_describe(binding)}" for name, binding in record.values.items() if _is_given(binding)]
    opaque = sum(region["kind"] == "opaque" for region in record.regions)
    lines = [
        f'"""The split graph of program `{key[:16]}`: {len(record.regions)} regions, {opaque} of them opaque, over',
        f"{distinct} distinct pieces. `computation_graph` at the end makes one call a region.",
        "",
        "It takes, then the weights by their qualified names:",
        *inputs,
        '"""',
    ]
    return "\n".join(lines)


def _is_given(binding: Mapping[str, Any]) -> bool:
    return binding["kind"] in ("symbol", "input")


def _describe(binding: Mapping[str, Any]) -> str:
    return "a size" if binding["kind"] == "symbol" else f"`{binding['name']}` {binding['spec']}"


def _imports(record: Record, functions: Sequence[str], classes: Mapping[str, str]) -> str:
    lines = ["import math", "import operator", "", "import torch"]
    modules = {module for module in record.operators.values() if module and module != "__main__"}
    modules |= {module for text in functions for module in _modules_in(text)}
    lines += [f"import {module}" for module in sorted(modules)]
    for name, path in classes.items():
        module, _, qualified = path.partition(":")
        lines += [f"import {module}", f"{name} = {module}.{qualified}"]
    return "\n".join(lines)


def _modules_in(text: str) -> set[str]:
    """Return the modules that a function's dotted names begin with, torch and the standard ones apart."""
    found = set()
    for node in ast.walk(parse_python(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            path = ast.unparse(node.func).split(".")
            if path[0].isidentifier() and path[0] not in _ROOTS and path[0] in sys.modules:
                ends = range(len(path) - 1, 0, -1)
                found |= {next(m for end in ends if (m := ".".join(path[:end])) in sys.modules)}
    return found


def _piece_function(number: int, text: str, record: Record) -> str:
    sites = sum(region["kind"] == "piece" and region["piece"] == number for region in record.regions)
    boxes = ", ".join(record.pieces[number].artifacts)
    note = f"# {digest_text(text)[:16]}: {sites} site{'s' * (sites != 1)}; compiled for {boxes}"
    return f"{note}\n{text.rstrip().replace('def piece(', f'def piece_{number}(', 1)}"


def _region(region: Mapping[str, Any], record: Record, calls: _OpaqueFunctions) -> str:
    """Write the one call that a region is."""
    if region["kind"] == "piece":
        function, arguments = f"piece_{region['piece']}", list(region["arguments"])
        results = list(region["results"])
    else:
        function, arguments, results = calls.add(region["kind"], region["calls"], region["results"])
    given = [_argument(name, record) for name in arguments]
    target = f"{', '.join(results)}{',' * (len(results) == 1)} = " if results else ""
    line = f"{target}{function}({', '.join(given)})"
    return line if len(line) <= _WIDTH else f"{target}{function}(\n" + "".join(f"    {a},\n" for a in given) + ")"


def _argument(name: str, record: Record) -> str:
    binding = record.values.get(name)
    if binding is None or binding["kind"] not in _STATIC:
        return name
    parts = [f"weights[{part!r}]" for part, _ in binding.get("parts", ())]
    return f"torch.cat([{', '.join(parts)}])" if parts else f"weights[{binding['name']!r}]"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


class _OpaqueFunctions:
    """The opaque regions as functions: names of values and of sites become parameters, so that like regions are one."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._numbers: dict[tuple[str, str], int] = {}

    def add(
        self, kind: str, calls: Sequence[Mapping[str, str]], wanted: Sequence[str]
    ) -> tuple[str, list[str], list[str]]:
        """Return the function's name, the region's arguments and its results, for one region's calls."""
        rename = _Rename(self._known)
        lines, made = [], []
        for call in calls:
            arguments = rename.text(call["arguments"])
            results = _names(call["results"])
            targets = [rename.result(name) for name in results]
            made += [name for name in results if name != "_"]
            comma = "," if call["results"].endswith(",") else ""
            lines.append(f"    {', '.join(targets)}{comma} = {_call(call['operator'], arguments)}")
        leaves = [name for name in made if name in wanted]
        lines.append(f"    return {_tuple([rename.names[name] for name in leaves])}")
        text = "\n".join([f"({', '.join(rename.parameters)}):", *lines])
        number = self._numbers.setdefault((kind, text), len(self._numbers))
        return f"{kind}_{number}", list(rename.parameters.values()), leaves

    def texts(self) -> list[str]:
        """Return the functions' definitions in the order in which they are first called."""
        return [f"def {kind}_{number}{text}" for (kind, text), number in self._numbers.items()]


def _names(results: str) -> list[str]:
    return [name.strip() for name in results.split(",") if name.strip()]


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def _call(operator: str, arguments: str) -> str:
    if operator.startswith("."):
        receiver, _, rest = arguments.partition(", ")
        return f"{receiver}{operator}({rest})"
    path = f"torch.ops.{operator.replace('::', '.')}" if "::" in operator else operator
    return f"{path}({arguments})"


class _Rename(ast.NodeTransformer):
    """Give values and strings of one region names of its own, in order of first use."""

    def __init__(self, known: Collection[str]) -> None:
        self.known = known
        self.names: dict[str, str] = {}
        self.parameters: dict[str, str] = {}

    def text(self, arguments: str) -> str:
        """Rewrite a call's arguments."""
        call = parse_python(f"_({arguments})", "eval").body
        assert isinstance(call, ast.Call)
        parts = [ast.unparse(self.visit(argument)) for argument in call.args]
        parts += [f"{word.arg}={ast.unparse(self.visit(word.value))}" for word in call.keywords]
        return ", ".join(parts)

    def result(self, name: str) -> str:
        """Name a result of a call of the region."""
        if name == "_":
            return name
        return self.names.setdefault(name, f"r{len(self.names)}")

    def _parameter(self, text: str, letter: str) -> str:
        name = next((name for name, given in self.parameters.items() if given == text), None)
        if name is None:
            name = f"{letter}{len(self.parameters)}"
            self.parameters[name] = text
        return name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.known:
            node.id = self.names.get(node.id) or self._parameter(node.id, "x")
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_text = isinstance(node.value, str)
        return ast.Name(self._parameter(repr(node.value), "name"), ast.Load()) if is_text else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Leave `torch.device("cpu")` and `float("nan")` as they are: their strings name no site."""
        node.args = [arg if isinstance(arg, ast.Constant) else self.visit(arg) for arg in node.args]
        return node
