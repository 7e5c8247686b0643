"""The conditions on sizes that a trace left in torch's shape environment, as text over the declared names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from piecework.seam.symbols import SymbolTable
from piecework.values.graph import ShapeGuard


def _shape_environment(nodes: Sequence[fx.Node]) -> Any:
    """Find the environment on any value of the graph: a model that reads sizes alone has no tensor among its inputs."""
    for node in nodes:
        value = node.meta.get("example_value")
        for one in value if isinstance(value, tuple | list) else (value,):
            mode = getattr(one, "fake_mode", None) or getattr(one, "node", None)
            environment = getattr(mode, "shape_env", None)
            if environment is not None:
                return environment
    return None


def read_shape_guards(
    nodes: Sequence[fx.Node], table: SymbolTable, files: Collection[str], equal: Sequence[tuple[str, str]]
) -> tuple[ShapeGuard, ...]:
    """Return the conditions over declared names, with the user's lines; `equal` are names that were taken for one.

    `files` are those that the trace read: torch cuts long paths at the front, and they are completed from these.
    """
    environment, found, merged = _shape_environment(nodes), [], ""
    for guard in environment.guards if environment is not None else ():
        line = str(getattr(guard.sloc, "maybe_user_loc", "") or getattr(guard.sloc, "framework_loc", ""))
        if all(symbol in table.declared for symbol in guard.expr.free_symbols):
            found.append(ShapeGuard(str(table.text(guard.expr)), place_of(line, files)))
        elif type(guard.expr).__name__ == "Equality":
            merged = merged or place_of(line, files)
        elif not any(environment.is_unbacked_symint(symbol) for symbol in guard.expr.free_symbols):
            # A size that nothing declares can be proven for no call: the audit refuses it by this text.
            found.append(ShapeGuard(str(table.text(environment.replace(guard.expr))), place_of(line, files)))
    found += [ShapeGuard(f"{one} == {two}", merged) for one, two in equal]
    return tuple(dict.fromkeys(found))


def sizes_by_source(nodes: Sequence[fx.Node]) -> dict[str, Any]:
    """Return the expression of every size that Dynamo gave a symbol, by Dynamo's text of where it is read.

    An input of which forward reads sizes alone is no input of the graph: its symbols are found here only.
    """
    environment = _shape_environment(nodes)
    if environment is None:
        return {}
    return {
        source.name: environment.replace(symbol)
        for symbol, sources in environment.var_to_sources.items()
        for source in sources
    }


def source_of_size(path: str, dim: int) -> str:
    """Write where a size is read as Dynamo does, which is given every argument by name."""
    root = re.split(r"[.\[]", path, maxsplit=1)[0]
    return f"L['kwargs'][{root!r}]{path[len(root) :]}.size()[{dim}]"


def place_of(line: str, files: Collection[str]) -> str:
    """Turn torch's `code  # path:line in function` into `path:line (code)`."""
    code, _, place = line.partition("  # ")
    if not place:
        return line
    path, _, number = place.split(" in ")[0].rpartition(":")
    whole = next((file for file in sorted(files) if path and file.endswith(path)), path)
    return f"{whole}:{number} ({code.strip()})"
