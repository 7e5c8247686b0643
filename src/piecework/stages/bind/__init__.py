"""Bind: record + loaded pieces + weights + opaque bodies become one callable.

The program is generated flat Python: it calls pieces and opaque bodies in order, lets go of each tensor
after its last use, and picks the range once per call. Cold and warm starts both end here.
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from piecework.errors import BindError
from piecework.runtime.explain import Checked, Held, Leaf, rivals_of
from piecework.runtime.first_calls import EverySize, FirstCalls
from piecework.runtime.lazy_sizes import Loaded, OnDemand, add_sizes
from piecework.runtime.program import Program
from piecework.runtime.regions import Bound
from piecework.runtime.signature import compile_check
from piecework.runtime.small_steps import LARGEST, SmallSteps, bind_sizes
from piecework.stages.bind.outline import outline, region_lines, result_of
from piecework.stages.bind.promises import (
    body_names,
    first_call_lines,
    names_in_lines,
    symbols_of,
    watch_piece,
    watched_bodies,
)
from piecework.values.declaration import registry
from piecework.values.graph import inside
from piecework.values.overlap import shared_with_written
from piecework.values.record import Record
from piecework.values.shapes import Range, box_for, combinations, format_box, parse_range
from piecework.values.signature import parse_spec
from piecework.values.static import static_values, weights_by_name

_NAME = re.compile(r"[A-Za-z_]\w*")
Body = Callable[..., Any]


def bind(
    record: Record,
    loaded: Loaded,
    weights: Mapping[str, torch.Tensor],
    bodies: Mapping[str, Body],
    *,
    key: str,
    elsewhere: Program | None = None,
    on_demand: OnDemand | None = None,
) -> Program:
    """Return the program of `record` over `weights` (by qualified name), with opaque `bodies` by operator name.

    Sizes that the record does not serve go to `elsewhere`, the program of its siblings. `on_demand` makes artifacts
    of single sizes when such a size is met.
    """
    static = static_values(record, weights)
    namespace = _namespace(record, bodies)
    source = _run_source(record, namespace)
    code = compile(source, f"<piecework program {key[:12]}>", "exec")

    called = {name: bodies[name] for name in inside(record.partition, record.split_ops)}

    def make(pieces: Loaded, ranges: Mapping[str, Sequence[Range]]) -> list[Body]:
        repeats = _may_repeat(record)
        pieces = with_bodies(pieces, called)
        every = combinations(ranges)
        return [_make_run(code, record, one, pieces, static, namespace, repeats=repeats) for one in every]

    choices = tuple(combinations(_ranges(record)))
    runs = tuple(make(loaded, _ranges(record)))
    leaves = _leaves(record)
    held = _held(record, static)
    _refuse_shared(held)
    checked = _checked(record, rivals_of(leaves, held))
    served = list(runs)
    sizes = add_sizes(served, record, _ranges(record), make, on_demand)
    call, check_source = compile_check(leaves, checked, served, elsewhere, sizes)
    return Program(
        call,
        key=key,
        source=check_source + "\n\n" + source,
        weights=weights_by_name(record, static),
        elsewhere=elsewhere,
        bound=Bound(leaves, checked, runs, choices, partial(outline, record, with_bodies(loaded, called), choices)),
    )


def with_bodies(loaded: Loaded, bodies: Mapping[str, Body]) -> Loaded:
    """Return loaded pieces that call these bodies in the places of the operators inside."""
    if not bodies:
        return loaded
    made: dict[int, Any] = {}
    for piece in loaded.values():
        change = getattr(piece, "with_bodies", None)
        made[id(piece)] = piece if change is None else change(bodies)
    return {place: made[id(piece)] for place, piece in loaded.items()}


def _ranges(record: Record) -> dict[str, tuple[Range, ...]]:
    """Return each symbol's ranges, in the order of the symbols: the store sorts the names of a mapping."""
    return {s["name"]: tuple(map(parse_range, record.ranges[s["name"]])) for s in record.symbols}


def _namespace(record: Record, bodies: Mapping[str, Body]) -> dict[str, Any]:
    """Return the names that the program's code refers to, beside its pieces."""
    space: dict[str, Any] = {"torch": torch, "math": math, "operator": operator, "builtins": builtins}
    space |= names_in_lines(record)
    for name, body in body_names(record).items():
        if not name.startswith("."):
            space[body] = bodies[name] if "::" in name else _plain_function(name)
    return space


def _plain_function(name: str) -> Body:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def _run_source(record: Record, namespace: dict[str, Any]) -> str:
    """Write `run`: one line a region, then a `del` of what is not needed any more."""
    lines = [line for each in region_lines(record) for line in each]
    classes: dict[str, str] = {}
    result, parameters = result_of(record, classes)
    namespace.update({name: _plain_function(path.replace(":", ".")) for name, path in classes.items()})
    body = [*first_call_lines(record, parameters), *_with_releases(lines, result, set(record.values) | set(parameters))]
    return (
        f"def run({', '.join(parameters)}):\n" + "\n".join(f"    {line}" for line in body) + f"\n    return {result}\n"
    )


def _with_releases(lines: Sequence[str], result: str, kept: set[str]) -> list[str]:
    last: dict[str, int] = {}
    for index, line in enumerate(lines):
        for name in _NAME.findall(line):
            if name.startswith("v") and name[1:].isdigit():
                last[name] = index
    needed = set(_NAME.findall(result))
    out = []
    for index, line in enumerate(lines):
        out.append(line)
        gone = [name for name, where in last.items() if where == index and name not in needed and name not in kept]
        if gone and index < len(lines) - 1:
            out.append(f"del {', '.join(gone)}")
    return out


def _make_run(
    code: Any,
    record: Record,
    one: Mapping[str, Range],
    loaded: Loaded,
    static: Mapping[str, torch.Tensor],
    namespace: Mapping[str, Any],
    *,
    repeats: bool,
) -> Body:
    pieces = {
        index: loaded[region["piece"], format_box(box_for(region["symbols"], one))]
        for index, region in enumerate(record.regions)
        if region["kind"] == "piece"
    }

    def weights_of(index: int) -> list[torch.Tensor]:
        return [static[name] for name in record.regions[index]["arguments"] if name in static]

    bound = {f"piece_{index}": piece.bind(weights_of(index)) for index, piece in pieces.items()}

    def run_with(calls: Mapping[str, Body], names: Mapping[str, Any]) -> Body:
        space: dict[str, Any] = {**namespace, **static, **calls, **names}
        exec(code, space)
        return space["run"]  # type: ignore[no-any-return]

    def watching() -> Body:
        """Return the run whose bodies are held to their operators' contracts, those inside pieces too."""
        again = {
            f"piece_{index}": seen.bind(weights_of(index))
            for index, piece in pieces.items()
            if (seen := watch_piece(piece)) is not None
        }
        return run_with({**bound, **again, **watched_bodies(record, namespace)}, {"_met": EverySize()})

    result, parameters = result_of(record, {})
    sizes = symbols_of(record)
    first = FirstCalls(watching, sizes, [parameters.index(name) for name in sizes])
    names = {"_met": first.met, "_first": first}
    general = run_with(bound, names)
    symbols = [name for name in parameters if name in sizes]
    if not repeats or not symbols or one[symbols[0]].low > LARGEST or record.device != "cpu":
        return general
    returned = frozenset(_NAME.findall(result))

    def make(sizes: Mapping[str, int]) -> tuple[Body, int] | None:
        made = bind_sizes(record.regions, pieces, static, returned, sizes)
        return None if made is None else (run_with(made[0], names), made[1])

    return SmallSteps(general, make).dispatch(symbols, parameters)


def _may_repeat(record: Record) -> bool:
    """Tell whether every opaque body promised to keep no argument beyond its step."""
    declared = [registry.get(name.partition(".")[0]) for name in record.split_ops]
    return all(op is not None and not op.retains_arguments for op in declared)


def _leaves(record: Record) -> list[Leaf]:
    by_path = {b["name"]: name for name, b in record.values.items() if b["kind"] == "input"}
    found = []
    for index, leaf in enumerate(record.inputs):
        spec = None if leaf["spec"] is None else parse_spec(leaf["spec"])
        name = by_path.get(leaf["path"], f"a{index}")
        is_read = leaf["path"] in by_path
        found.append(Leaf(leaf["path"], name, spec, leaf["value"], leaf["same_as"], leaf["written"], is_read))
    return found


def _held(record: Record, static: Mapping[str, torch.Tensor]) -> list[Held]:
    """Return the tensors that a record's program holds, with what it writes to."""
    return [
        Held(binding["kind"], binding["name"], static[name], bool(binding.get("written")))
        for name, binding in record.values.items()
        if name in static
    ]


def _refuse_shared(held: Sequence[Held]) -> None:
    """Raise where the program writes to a tensor of its own that shares memory with another: pieces know of no such."""
    written = {one.name: one.tensor for one in held if one.is_written}
    found = shared_with_written(written, {one.name: one.tensor for one in held}) if written else None
    if found is not None:
        raise BindError(
            f"weights `{found[0]}` and `{found[1]}` share memory, and the model writes to `{found[0]}`",
            hint="give each a tensor of its own, or keep one of them and take the view of it inside forward",
            facts={"written": found[0], "shared": found[1]},
        )


def _checked(record: Record, rivals: tuple[Held, ...]) -> Checked:
    symbols = {
        symbol["name"]: (
            tuple(map(tuple, symbol["places"])),
            [parse_range(text) for text in record.ranges[symbol["name"]]],
        )
        for symbol in record.symbols
    }
    run_names = [name for name, b in record.values.items() if b["kind"] in ("symbol", "input")]
    result = str(record.result)
    run_names += [f"a{i}" for i, leaf in enumerate(record.inputs) if f"argument:{leaf['path']}" in result]
    devices = {str(b["spec"]).rsplit(" ", 1)[-1] for b in record.values.values() if b["spec"]}
    return Checked(
        parameters=tuple(tuple(p) for p in record.parameters),
        arguments=record.arguments,
        symbols=symbols,
        passed=tuple(run_names),
        on_cuda="cuda" in devices,
        bounds={name: parse_range(text) for name, text in record.bounds.items()},
        containers=tuple((path, keys) for path, keys in record.containers),
        rivals=rivals,
    )
