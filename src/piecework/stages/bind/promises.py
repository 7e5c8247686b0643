"""The lines of a program that hold what opaque bodies give against their operators' fakes, and the names in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from piecework.runtime.promised import count_test, refusal, result_test
from piecework.seam.promises import is_custom_name
from piecework.seam.watched import watched
from piecework.values.graph import NOTHING
from piecework.values.record import Record
from piecework.values.signature import TensorSpec, parse_spec

Call = Mapping[str, Any]


def symbols_of(record: Record) -> list[str]:
    """Return the names of the sizes that a program's code knows."""
    return [name for name, binding in record.values.items() if binding["kind"] == "symbol"]


def call_lines(place: str, call: Call, target: str, made: str, known: Collection[str]) -> Iterator[str]:
    """Yield the lines of one opaque call, `made`, whose results are then looked at; `place` names it in the program."""
    specs = call.get("specs", ())
    results = _names(call)
    if any(specs) and "," in call["results"]:
        made = f"_counted_{place}({', '.join([made, *known])})"
    yield f"{target}{made}"
    for position, (name, spec) in enumerate(zip(results, specs, strict=False)):
        test = result_test(name, spec, known) if spec else ""
        if test:
            yield f"if {test}: _unlike_{place}_{position}({', '.join([name, *known])})"


def names_in_lines(record: Record) -> dict[str, Any]:
    """Return what the lines of a record's opaque calls refer to."""
    known = symbols_of(record)
    space: dict[str, Any] = {"_Tensor": torch.Tensor}
    for place, call in opaque_calls(record):
        specs, operator = call.get("specs", ()), call["operator"].partition(".")[0]
        if any(specs) and "," in call["results"]:
            space[f"_counted_{place}"] = count_test(operator, len(specs), known)
        for position, spec in enumerate(specs):
            what = f"result {position}" if len(specs) > 1 else "result"
            space[f"_unlike_{place}_{position}"] = refusal(operator, what, spec, known) if spec else None
            parsed = parse_spec(spec) if spec and spec != NOTHING else None
            if isinstance(parsed, TensorSpec):
                space[f"_{parsed.dtype}"] = getattr(torch, parsed.dtype)
    return space


def first_call_lines(record: Record, parameters: Sequence[str]) -> list[str]:
    """Return the line that sends the first call of a size through watched bodies; none where there are no bodies."""
    if not any("::" in name and is_custom_name(name) for name in record.operators):
        return []
    known = symbols_of(record)
    sizes = known[0] if len(known) == 1 else f"({', '.join(known)})"
    return [f"if {sizes} not in _met: return _first({', '.join(parameters)})"]


def watched_bodies(record: Record, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bodies that a record's opaque calls name, each held to its operator's contract.

    What they give is looked at by the lines of the program itself.
    """
    return {
        body: watched(operator, namespace[body], with_fake=False)
        for operator, body in body_names(record).items()
        if "::" in operator and is_custom_name(operator)
    }


def watch_piece(piece: Any) -> Any:
    """Return a piece whose calls of operators that are not torch's own are watched; None where it makes none."""
    change = getattr(piece, "watching", None)
    return None if change is None else change(watched)


def body_names(record: Record) -> dict[str, str]:
    """Return the name in the program's code of each operator that a record calls as it stands."""
    operators = dict.fromkeys(call["operator"] for _, call in opaque_calls(record))
    return {operator: f"body_{number}" for number, operator in enumerate(operators)}


def opaque_calls(record: Record) -> Iterator[tuple[str, Call]]:
    """Yield each call that a record makes as it stands, with its place."""
    for index, region in enumerate(record.regions):
        for number, call in enumerate(region["calls"]):
            yield f"{index}_{number}", call


def _names(call: Call) -> list[str]:
    return [name.strip() for name in call["results"].split(",") if name.strip()]
