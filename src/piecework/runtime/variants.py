"""Several programs of one model, one for each presence pattern of its arguments, as one; a call's arguments choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework.errors import InputError, ShapeOutOfRange
from piecework.runtime.program import Program
from piecework.values.signature import BY_NAME


@dataclass(frozen=True)
class Pattern:
    """Forward's parameters with their defaults, the arguments that a trace was given, and those that are constants."""

    parameters: tuple[tuple[str, Any], ...]
    arguments: tuple[str, ...]
    constants: Mapping[str, Any]


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
    names = [name for name, _ in parameters if name != BY_NAME]
    table: dict[tuple[str, ...], list[Program]] = {}
    for program, pattern in variants:
        table.setdefault(pattern.arguments, []).append(program)
    choose = _chooser(variants, dict(parameters))
    head = ", ".join(name if name == BY_NAME else f"{name}=None" for name, _ in parameters)
    lines = [f"def call({head}):"]
    lines.append(f"    given = ({' '.join(f'{name} is not None,' for name in names)})")
    space: dict[str, Any] = {"choose": choose}
    plain = [given for given, fitting in table.items() if len(fitting) == 1 and not _has_constant(given, variants)]
    for index, given in enumerate(plain):
        space[f"call_{index}"] = table[given][0]
        passed = ", ".join(f"{name}={name}" for name in given)
        lines.append(f"    if given == {tuple(name in given for name in names)!r}: return call_{index}({passed})")
    lines.append(f"    return choose({{{', '.join(f'{name!r}: {name}' for name in names)}}})")
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


def _has_constant(given: tuple[str, ...], variants: Sequence[tuple[Program, Pattern]]) -> bool:
    return any(pattern.arguments == given and pattern.constants.keys() & set(given) for _, pattern in variants)


def _chooser(
    variants: Sequence[tuple[Program, Pattern]], defaults: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Any]:
    """Return the slow way: the first variant that fits, where a value that is forward's default may be absent."""

    def choose(arguments: Mapping[str, Any]) -> Any:
        given = {name: value for name, value in arguments.items() if value is not None}
        needed = {name for name, value in given.items() if not _is_default(value, defaults.get(name))}
        reasons: list[InputError] = []
        for program, pattern in variants:
            optional = {name for name, value in pattern.constants.items() if _is_default(value, defaults.get(name))}
            if not (needed <= set(pattern.arguments) and set(pattern.arguments) - optional <= set(given)):
                continue
            try:
                return program(**{name: value for name, value in given.items() if name in pattern.arguments})
            except ShapeOutOfRange:
                raise
            except InputError as error:
                reasons.append(error)
        if len(reasons) == 1:
            raise reasons[0]
        raise _refusal(list(given), variants, reasons)

    return choose


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and isinstance(value, int | float | str | bool) and value == default


def _refusal(
    given: Sequence[str], variants: Sequence[tuple[Program, Pattern]], reasons: Sequence[InputError]
) -> InputError:
    if reasons:
        return InputError(
            f"none of the `{len(reasons)}` traced variants takes these arguments: "
            + "; ".join(error.message for error in reasons),
            hint="compile with an example like this one too",
        )
    traced = [pattern.arguments for _, pattern in variants]
    return InputError(
        f"arguments `{', '.join(given)}` were not given together when the program was traced",
        hint="traced are " + "; ".join(f"`{', '.join(one)}`" for one in traced) + ": compile with this pattern too",
        facts={"given": list(given), "traced": [list(one) for one in traced]},
    )
