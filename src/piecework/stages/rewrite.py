"""Rewrite: the passes of a request run over the whole graph, and what goes wrong on a piece is told by its cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from piecework.errors import PassError
from piecework.events import Observer, PassDone
from piecework.passes import apply_passes
from piecework.values.artifact import Compiler
from piecework.values.graph import PIECE as PIECE_REGION
from piecework.values.graph import Plan, Region, TracedGraph
from piecework.values.rewriting import PIECE, GraphPass, PassReport, PassStep


def rewrite(
    traced: TracedGraph,
    passes: Sequence[GraphPass],
    compiler: Compiler,
    observer: Observer,
    witness: Callable[[str, Any], Any],
) -> tuple[TracedGraph, list[dict[str, Any]]]:
    """Run the passes that take the whole graph; return it, and what each did as the record keeps it.

    Passes on a piece run inside the compiler; where it has no functional piece the report says that they do not run.
    """
    whole = [one for one in passes if one.runs_on != PIECE]
    traced, every = apply_passes(traced, whole)
    steps = tuple(step for one, step in zip(whole, every, strict=True) if not one.is_quiet or _says_something(step))
    witness("passes", steps)
    for step in steps:
        observer(_event(step.report, step.start_ns, step.end_ns))
    skipped = [
        PassReport(one.name, one.version, one.runs_on, note=f"compiler `{compiler.name}` has no functional piece")
        for one in passes
        if one.runs_on == PIECE and not hasattr(compiler, "with_passes")
    ]
    for report in skipped:
        observer(_event(report, 0, 0))
    return traced, [report.as_dict() for report in (*(step.report for step in steps), *skipped)]


def _says_something(step: PassStep) -> bool:
    return bool(step.report.matches or step.report.misses)


def _event(report: PassReport, start_ns: int, end_ns: int) -> PassDone:
    return PassDone(
        name=report.name,
        version=report.version,
        runs_on=report.runs_on,
        matches=len(report.matches),
        note=report.note,
        start_ns=start_ns,
        end_ns=end_ns,
    )


@contextmanager
def naming_cuts(plan: Plan) -> Iterator[None]:
    """Add to the error of a pass on a piece which value of the program it changed, and at which cut."""
    try:
        yield
    except PassError as error:
        where = _crossing(plan, int(error.facts.get("piece", -1)), str(error.facts.get("crosses", "")))
        if not where:
            raise
        value, cut = where
        message = f"{error.message}: that is `{value}`, which crosses the cut {cut}"
        raise PassError(message, hint=error.hint, facts={**error.facts, "value": value, "cut": cut}) from error


def _crossing(plan: Plan, number: int, crosses: str) -> tuple[str, str] | None:
    """Return the program's name of a piece's `result 1` or `input 0`, and the cut at which it crosses."""
    side, _, index = crosses.partition(" ")
    place = next((i for i, r in enumerate(plan.regions) if r.kind == PIECE_REGION and r.piece == number), None)
    if place is None or not index.isdigit():
        return None
    region = plan.regions[place]
    names = region.results if side == "result" else region.arguments
    if int(index) >= len(names):
        return None
    name = names[int(index)]
    own = f"piece {number} (region {place})"
    if side == "result":
        others = [i for i, r in enumerate(plan.regions) if i > place and name in _reads(r)]
        return name, f"from {own} to {_region_name(plan, others[0]) if others else 'the caller'}"
    if name in plan.values:
        return f"{name} ({plan.values[name].name})", f"into {own}"
    others = [i for i, r in enumerate(plan.regions) if i < place and name in r.results]
    return name, f"from {_region_name(plan, others[-1]) if others else 'the caller'} to {own}"


def _reads(region: Region) -> set[str]:
    words = " ".join(call.arguments for call in region.calls).replace(",", " ").replace("(", " ").replace(")", " ")
    return {*region.arguments, *words.split()}


def _region_name(plan: Plan, index: int) -> str:
    region = plan.regions[index]
    calls = ", ".join(f"`{call.operator}`" for call in region.calls)
    what = f"piece {region.piece}" if region.kind == PIECE_REGION else calls
    return f"{what} (region {index})"
