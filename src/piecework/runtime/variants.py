"""Several programs of one model, one for each presence pattern of its arguments, as one; the call's arguments choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework.errors import InputError, ShapeOutOfRange
from piecework.runtime.program import Program


@dataclass(frozen=True)
class Pattern:
    """Forward's parameters with their defaults, the arguments that a trace was given, and those that are constants."""

    parameters: tuple[tuple[str, Any], ...]
    arguments: tuple[str, ...]
    constants: Mapping[str, Any]

    def spellings(self) -> list[tuple[str, ...]]:
        """Return the sets of arguments that mean this pattern: a constant that is forward's default may be left out."""
        defaults = dict(self.parameters)
        needless = {name for name, value in self.constants.items() if defaults.get(name) == value}
        return [self.arguments, *([tuple(a for a in self.arguments if a not in needless)] if needless else [])]


def pattern_of(program: Program) -> Pattern:
    """Return what a bound program takes."""
    assert program.bound is not None
    checked = program.bound.checked
    constants = {leaf.path: leaf.value for leaf in program.bound.leaves if leaf.spec is None}
    return Pattern(checked.parameters, checked.arguments, constants)


def join_variants(programs: Sequence[Program]) -> Program:
    """Return the program that hands each call to the variant whose arguments it gives.

    Where several variants take the same arguments (of another dtype, rank or constant value), the first that
    the call fits is taken. Raises InputError, by the arguments' names, where none was traced.
    """
    if len(programs) == 1:
        return programs[0]
    variants = [(program, pattern_of(program)) for program in programs]
    parameters = variants[0][1].parameters
    names = [name for name, _ in parameters]
    table: dict[tuple[bool, ...], list[Program]] = {}
    for program, pattern in variants:
        for spelling in pattern.spellings():
            table.setdefault(tuple(name in spelling for name in names), []).append(program)
    traced = [pattern.arguments for _, pattern in variants]
    lines = [f"def call({', '.join(f'{name}=None' for name in names)}):"]
    lines.append(f"    given = ({' '.join(f'{name} is not None,' for name in names)})")
    space: dict[str, Any] = {"refuse": _refuse(names, traced)}
    for index, (given, fitting) in enumerate(table.items()):
        space[f"call_{index}"] = fitting[0] if len(fitting) == 1 else _first_that_fits(fitting)
        passed = ", ".join(f"{name}={name}" for name, here in zip(names, given, strict=True) if here)
        lines.append(f"    if given == {given!r}: return call_{index}({passed})")
    lines.append("    refuse(given)")
    source = "\n".join(lines) + "\n"
    exec(compile(source, "<piecework variants>", "exec"), space)
    weights: dict[str, torch.Tensor] = {}
    for program in programs:
        weights.update(program.weights)
    joined = Program(
        space["call"],
        key=",".join(program.key for program in programs),
        source="\n\n".join([source, *(program.source for program in programs)]),
        weights=weights,
    )
    joined.variants = tuple(programs)
    return joined


def _first_that_fits(programs: Sequence[Program]) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        reasons = []
        for program in programs:
            try:
                return program(**arguments)
            except ShapeOutOfRange:
                raise
            except InputError as error:
                reasons.append(error.message)
        raise InputError(
            f"none of the `{len(programs)}` traced variants takes these arguments: " + "; ".join(reasons),
            hint="compile with an example like this one too",
        )

    return call


def _refuse(names: Sequence[str], traced: Sequence[tuple[str, ...]]) -> Callable[[tuple[bool, ...]], None]:
    def refuse(given: tuple[bool, ...]) -> None:
        present = [name for name, here in zip(names, given, strict=True) if here]
        raise InputError(
            f"arguments `{', '.join(present)}` were not given together when the program was traced",
            hint="traced are " + "; ".join(f"`{', '.join(one)}`" for one in traced) + ": compile with this pattern too",
            facts={"given": present, "traced": [list(one) for one in traced]},
        )

    return refuse
