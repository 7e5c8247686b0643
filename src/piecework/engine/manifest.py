"""The prewarm manifest: which compiles happened while a server served, and the steps that caused them; torch-free.

One JSON object a line, so that a server can add to it and a file cut short loses one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecework.engine.shapes import StepShape
from piecework.errors import OptionError

FORMAT = 1


@dataclass(frozen=True)
class Specialisation:
    """One compile: by what, of what, and the step in which it happened; None where it was outside of any."""

    kind: str
    what: str
    shape: StepShape | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        shape = self.shape.as_dict() if self.shape is not None else None
        return {"format": FORMAT, "kind": self.kind, "what": self.what, "shape": shape}

    def __str__(self) -> str:
        """Say it in a line."""
        where = "outside of any step"
        if self.shape is not None:
            shape = self.shape
            where = (
                f"{shape.phase}, {shape.num_tokens} tokens, {shape.num_sequences} sequences, longest {shape.longest}"
            )
        return f"{self.kind}: {self.what or 'unnamed'} ({where})"


def append(file: Path, found: Specialisation) -> None:
    """Add a line; one write, so that two servers may share a file."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(found.as_dict(), ensure_ascii=False) + "\n")


def read(file: Path) -> tuple[Specialisation, ...]:
    """Read a manifest; raise OptionError that names the line which is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise OptionError(
            f"the manifest `{file}` cannot be read: {error}", hint="name a file that a server wrote"
        ) from error
    return tuple(_parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip())


def shapes_in(found: Iterable[Specialisation]) -> tuple[StepShape, ...]:
    """Return the steps that a manifest asks for, each once, in the order in which they were met."""
    return tuple(dict.fromkeys(each.shape for each in found if each.shape is not None))


def _parse(line: str, where: str) -> Specialisation:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where} is not JSON: {error}", hint="remove the line: it was cut short") from error
    if not isinstance(value, Mapping) or value.get("format") != FORMAT:
        raise OptionError(
            f"{where} is not a line of a manifest in format {FORMAT}", hint="have a server of this release write one"
        )
    shape = value.get("shape")
    try:
        return Specialisation(
            str(value["kind"]), str(value.get("what", "")), StepShape(**shape) if shape is not None else None
        )
    except (KeyError, TypeError) as error:
        raise OptionError(f"{where} lacks a field: {error}", hint="have a server of this release write one") from error
