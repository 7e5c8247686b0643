"""The conditions on sizes that a trace left in torch's shape environment, as text over the declared names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from piecework.seam.symbols import SymbolTable
from piecework.values.graph import ShapeGuard


def _shape_environment(placeholders: Sequence[fx.Node]) -> Any:
    for node in placeholders:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None


def read_shape_guards(
    placeholders: Sequence[fx.Node], table: SymbolTable, files: Collection[str], equal: Sequence[tuple[str, str]]
) -> tuple[ShapeGuard, ...]:
    """Return the conditions over declared names, with the user's lines; `equal` are names that were taken for one.

    `files` are those that the trace read: torch cuts long paths at the front, and they are completed from these.
    """
    environment, found, merged = _shape_environment(placeholders), [], ""
    for guard in environment.guards if environment is not None else ():
        line = str(getattr(guard.sloc, "maybe_user_loc", "") or getattr(guard.sloc, "framework_loc", ""))
        if all(symbol in table.declared for symbol in guard.expr.free_symbols):
            found.append(ShapeGuard(str(table.text(guard.expr)), place_of(line, files)))
        elif type(guard.expr).__name__ == "Equality":
            merged = merged or place_of(line, files)
    found += [ShapeGuard(f"{one} == {two}", merged) for one, two in equal]
    return tuple(dict.fromkeys(found))


def place_of(line: str, files: Collection[str]) -> str:
    """Turn torch's `code  # path:line in function` into `path:line (code)`."""
    code, _, place = line.partition("  # ")
    if not place:
        return line
    path, _, number = place.split(" in ")[0].rpartition(":")
    whole = next((file for file in sorted(files) if path and file.endswith(path)), path)
    return f"{whole}:{number} ({code.strip()})"
