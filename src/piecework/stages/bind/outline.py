"""A record's regions as lines of the program's code, and as what a capture walks through, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from piecework.runtime.lazy_sizes import Loaded
from piecework.runtime.regions import Outline, RegionText
from piecework.stages.bind.promises import body_names, call_lines, symbols_of
from piecework.values.graph import BY_COMPILER, FX, OPAQUE, inside
from piecework.values.record import Record
from piecework.values.shapes import Range, box_for, format_box
from piecework.values.tree import render


def region_lines(record: Record) -> list[list[str]]:
    """Return the lines of each region."""
    bodies = body_names(record)
    return [_lines_of(index, region, bodies, record) for index, region in enumerate(record.regions)]


def outline(record: Record, loaded: Loaded, choices: Sequence[Mapping[str, Range]], choice: int) -> Outline:
    """Describe the program region by region, in the lines and names of its code; made when it is captured.

    A piece that was compiled whole and is cut in its text stands in it by the regions of that text, which the artifact
    of each range has for itself: `choice` says which of `choices` of ranges is asked for.
    """
    regions: list[RegionText] = []
    for index, (region, lines) in enumerate(zip(record.regions, region_lines(record), strict=True)):
        is_piece = region["kind"] == "piece"
        name = f"piece_{index}" if is_piece else f"region_{index}"
        operators = tuple(call["operator"] for call in region["calls"]) if region["kind"] == OPAQUE else ()
        whole = RegionText(region["kind"], name, tuple(lines), tuple(region["results"]), operators)
        if is_piece and record.partition == BY_COMPILER:
            piece = loaded[region["piece"], format_box(box_for(region["symbols"], choices[choice]))]
            regions += _cut(whole, piece, _passed(region, record)) or [whole]
        else:
            regions.append(whole)
    result, parameters = result_of(record, {})
    return Outline(tuple(parameters), tuple(regions), result, inside(record.partition, record.split_ops))


def whole_outline(record: Record) -> Outline:
    """Describe the program by the regions of its record, each piece as one."""
    return outline(replace(record, partition=FX), {}, (), 0)


def _cut(whole: RegionText, piece: Any, passed: Sequence[str]) -> list[RegionText]:
    """Return a piece's regions in the program's names; values between them are named after the piece."""
    names = dict(zip(piece.parameters, passed, strict=True)) if piece.regions() else {}
    found = []
    for index, part in enumerate(piece.regions()):
        arguments = tuple(names[name] for name in part.arguments)
        names |= {name: f"{whole.name}_{name}" for name in part.results}
        names |= {f"result_{i}": name for i, name in enumerate(whole.results)}
        results = tuple(names[name] for name in part.results)
        found.append(
            RegionText(
                part.kind, f"{whole.name}_{index}", (), results, part.operators, part.source, whole.name, arguments
            )
        )
    return found


def _passed(region: Mapping[str, Any], record: Record) -> list[str]:
    """Return the values that are passed to a piece with each call."""
    return [name for name in region["arguments"] if record.values.get(name, {}).get("kind") not in _STATIC]


def result_of(record: Record, classes: dict[str, str]) -> tuple[str, list[str]]:
    """Return the expression that builds the result, and the names that `run` is called with."""
    result = render(dict(record.result), classes)
    parameters = [name for name, b in record.values.items() if b["kind"] in ("symbol", "input")]
    parameters += [f"a{i}" for i, leaf in enumerate(record.inputs) if f"argument:{leaf['path']}" in result]
    for position, leaf in enumerate(record.inputs):
        result = result.replace(f"argument:{leaf['path']}", f"a{position}")
    return result, parameters


def _lines_of(index: int, region: Mapping[str, Any], bodies: Mapping[str, str], record: Record) -> list[str]:
    if region["kind"] == "piece":
        dynamic = _passed(region, record)
        target = (
            f"{', '.join(region['results'])}{',' if len(region['results']) == 1 else ''} = "
            if region["results"]
            else ""
        )
        return [f"{target}piece_{index}({', '.join(dynamic)})"]
    lines: list[str] = []
    known = symbols_of(record)
    for number, call in enumerate(region["calls"]):
        operator, results = call["operator"], call["results"]
        target = "" if results == "_" else f"{results} = "
        if operator.startswith("."):
            receiver, _, rest = call["arguments"].partition(", ")
            lines.append(f"{target}{receiver}{operator}({rest})")
        else:
            made = f"{bodies[operator]}({call['arguments']})"
            lines += call_lines(f"{index}_{number}", call, target, made, known)
    return lines


_STATIC = ("weight", "buffer", "constant")
