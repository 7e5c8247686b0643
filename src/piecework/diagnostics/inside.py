"""Inside a piece that is wrong: which of its calls gives the first value that differs.

The piece is compiled again so that it returns every value it makes, and these are compared in order. Where that is
right throughout, the fault is in the artifact that was stored, if compiling the piece anew makes it right; else in how
calls were joined, and the shortest beginning of the piece that is wrong is looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piecework.diagnostics.lockstep import kernel_paths
from piecework.errors import CompileError
from piecework.seam.evaluate import Change, evaluate
from piecework.seam.fx import PieceGraph, parse_piece
from piecework.seam.loader import load
from piecework.stages.verify.beside import expect, own_inputs
from piecework.store.protocol import KernelStore
from piecework.values.artifact import Compiler
from piecework.values.difference import Difference
from piecework.values.shapes import Box

CALL, JOINED, STORED, OUTPUT, REPLAY = "call", "joined calls", "stored artifact", "result", "replay"


@dataclass(frozen=True)
class Inside:
    """The value that differs first, the line of the text that makes it, and where the fault lies."""

    value: str
    line: str
    origin: str
    difference: Difference | None = None
    compiled: int = 0


def look_inside(
    text: str, box: Box, values: Sequence[Any], result: str, compiler: Compiler, store: KernelStore
) -> Inside:
    """Find the first value inside a piece that differs; `result` is the result that was found to be wrong."""
    plain = result.partition(" ")[0]
    names = _tensors_made(parse_piece(text), values)
    search = _Search(text, box, values, compiler, store)
    try:
        found = search.differing(names) if names else None
        if found is not None:
            return Inside(found.name, line_of(text, found.name), CALL, found, search.compiled)
        if search.differing(()) is None:
            return Inside(plain, line_of(text, plain), STORED, None, search.compiled)
        name, found = search.shortest(names)
        return Inside(name, line_of(text, name), JOINED, found, search.compiled)
    except CompileError:
        return Inside(plain, line_of(text, plain), OUTPUT, None, search.compiled)


def line_of(text: str, name: str) -> str:
    """Return the line of a text that makes a value, or that takes it as a parameter."""
    starts = (f"{name} = ", f"{name}: ")
    return next((line.strip().rstrip(",") for line in text.splitlines() if line.strip().startswith(starts)), "")


def returning(text: str, names: Sequence[str]) -> str:
    """Return a text that makes what it made, and returns the named values."""
    lines = text.rstrip("\n").splitlines()
    return "\n".join([*lines[:-1], f"    return ({', '.join(names)},)"]) + "\n"


class _Search:
    """Compiles variants of one piece and compares what they give with their texts."""

    def __init__(self, text: str, box: Box, values: Sequence[Any], compiler: Compiler, store: KernelStore) -> None:
        self._text, self._box, self._values = text, box, values
        self._compiler, self._store = compiler, store
        self.compiled = 0

    def differing(self, names: Sequence[str]) -> Difference | None:
        """Compile the piece so that it returns these values, or as it is without any; return the first that differs."""
        text = returning(self._text, names) if names else self._text
        self.compiled += 1
        artifact = self._compiler.compile(text, self._box)
        loaded = load(artifact, kernel_path=kernel_paths(artifact, self._store))
        found = expect(parse_piece(text), self._values).against(loaded)
        return next((each for each in found if each.is_fault), None)

    def shortest(self, names: Sequence[str]) -> tuple[str, Difference | None]:
        """Find by halving the first value that is wrong when the piece ends with it."""
        low, high = 0, len(names) - 1
        found: Difference | None = None
        while low < high:
            middle = (low + high) // 2
            differs = self.differing([names[middle]])
            if differs is not None:
                high, found = middle, differs
            else:
                low = middle + 1
        return names[low], found


def _tensors_made(piece: PieceGraph, values: Sequence[Any]) -> list[str]:
    """Return the values that a piece makes and that can be returned, in order."""
    names: list[str] = []

    def note(node: Any, value: Any) -> None:
        if isinstance(value, Tensor) and node.op in ("call_function", "call_method"):
            names.append(node.name)

    evaluate(piece, own_inputs(piece, values), Change(note=note))
    return names
