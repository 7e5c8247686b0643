"""Run passes over a graph, one after another: each is linted, timed, compared with what was, and counted."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from piecework.errors import PassError, PieceworkError
from piecework.passes.lint import (
    contract_of,
    crossing_values,
    fault_of,
    fault_of_form,
    fault_of_piece,
    lines_of,
    shorten,
)
from piecework.passes.snapshot import forget_changed, moved_write, snapshot_of
from piecework.seam.propagate import count_conditions, refresh_vals, refresh_values
from piecework.values.graph import TracedGraph
from piecework.values.rewriting import FunctionalPiece, GraphPass, PassReport, PassStep, Rewritten, digest_of


def apply_passes(traced: TracedGraph, passes: Sequence[GraphPass]) -> tuple[TracedGraph, tuple[PassStep, ...]]:
    """Run the passes over a whole traced graph; raise PassError naming the one that breaks it."""
    steps = []
    for one in passes:
        started, before, contract = time.perf_counter_ns(), lines_of(traced.graph), contract_of(traced)
        read, known, was = _read_weights(traced), count_conditions(traced.graph), snapshot_of(traced.graph)
        found = _call(one, traced, before, traced.graph)
        changed = found.graph
        if not isinstance(changed, TracedGraph):
            raise _error(one, f"it returned a `{type(changed).__name__}` for the graph", before, traced.graph)
        _require_form(one, changed.graph, before)
        try:
            fresh = refresh_values(changed.graph, changed.bindings, known, forget_changed(was, changed.graph))
        except PieceworkError:
            raise
        except Exception as error:
            reason = f"the graph does not run any more: `{type(error).__name__}: {str(error).strip()[:300]}`"
            raise _error(one, reason, before, changed.graph) from error
        traced = _without(changed, read - _read_weights(changed))
        fault = fault_of(contract, traced) or moved_write(was, traced.graph)
        if not fault and fresh:
            fault = f"it holds for some sizes only: `{fresh[0]}`"
        if fault:
            raise _error(one, fault, before, traced.graph)
        steps.append(_step(one, found, before, lines_of(traced.graph), started))
    return traced, tuple(steps)


def diff_of(step: PassStep) -> list[str]:
    """Return the difference that a pass made, as unified diff lines; none where it changed nothing."""
    return list(difflib.unified_diff(step.before, step.after, "before", f"after {step.report.name}", lineterm="", n=2))


class PieceRewriting:
    """The passes that run on a piece, as a compiler is handed them: called with a functional graph, in place."""

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        self._passes = tuple(passes)

    @property
    def digest(self) -> str:
        """What the passes add to a compiler's version."""
        return digest_of(self._passes)

    def __call__(self, graph: fx.Graph) -> tuple[PassStep, ...]:
        """Run each pass over a functional piece; raise PassError where what crosses a cut is another than before."""
        steps = []
        for one in self._passes:
            started, before, crossing = time.perf_counter_ns(), lines_of(graph), crossing_values(graph)
            was = snapshot_of(graph)
            found = _call(one, FunctionalPiece(graph), before, graph)
            if not isinstance(found.graph, FunctionalPiece) or found.graph.graph is not graph:
                raise _error(one, "a pass on a piece edits the graph that it is handed", before, graph)
            _require_form(one, graph, before)
            try:
                refresh_vals(graph, forget_changed(was, graph))
            except Exception as error:
                reason = f"the piece does not run any more: `{type(error).__name__}: {str(error).strip()[:300]}`"
                raise _error(one, reason, before, graph) from error
            fault = fault_of_piece(crossing, graph)
            if fault:
                raise _error(one, f"{fault}; it crosses a cut", before, graph, {"crosses": fault.partition(" is ")[0]})
            steps.append(_step(one, found, before, lines_of(graph), started))
        return tuple(steps)


def _call(one: GraphPass, value: Any, before: tuple[str, ...], graph: fx.Graph) -> Rewritten:
    function: Callable[[Any], Any] = one.function
    try:
        found = function(value)
    except PieceworkError:
        raise
    except Exception as error:
        raise _error(one, f"it raised `{type(error).__name__}: {str(error).strip()[:300]}`", before, graph) from error
    if not isinstance(found, Rewritten):
        raise _error(one, f"it returned a `{type(found).__name__}`", before, graph)
    for lines in (found.matches, found.misses):
        if not isinstance(lines, tuple | list) or not all(isinstance(line, str) for line in lines):
            raise _error(one, f"its matches or misses are `{lines!r}`, and not lines of text", before, graph)
    return found


def _require_form(one: GraphPass, graph: fx.Graph, before: tuple[str, ...]) -> None:
    fault = fault_of_form(graph)
    if fault:
        raise _error(one, fault, before, graph)


def _step(one: GraphPass, found: Rewritten, before: tuple[str, ...], after: tuple[str, ...], started: int) -> PassStep:
    report = PassReport(one.name, one.version, one.runs_on, tuple(found.matches), tuple(found.misses))
    if one.expects_match and not found.matches:
        report = replace(report, note=f"pass `{one.name}` matched nothing, where its author expects a match")
    return PassStep(report, before, after, started, time.perf_counter_ns())


def _read_weights(traced: TracedGraph) -> set[str]:
    """Return the names of the placeholders of weights that some node reads."""
    places = traced.graph.find_nodes(op="placeholder")
    return {n.name for n in places if n.users and n.name in traced.bindings and traced.bindings[n.name].is_static}


def _without(traced: TracedGraph, unread: set[str]) -> TracedGraph:
    """Drop the weights that nothing reads any more, and the bindings of placeholders that are gone."""
    for node in traced.graph.find_nodes(op="placeholder"):
        if node.name in unread:
            traced.graph.erase_node(node)
    held = {node.name for node in traced.graph.find_nodes(op="placeholder")}
    return replace(traced, bindings={name: b for name, b in traced.bindings.items() if name in held})


def _error(
    one: GraphPass, reason: str, before: tuple[str, ...], graph: fx.Graph, facts: dict[str, Any] | None = None
) -> PassError:
    lines = list(difflib.unified_diff(before, lines_of(graph), "before", f"after {one.name}", lineterm="", n=2))
    shown = f"\n{shorten(lines)}" if lines else ""
    return PassError(
        f"pass `{one.name}` broke the graph: {reason}{shown}",
        hint=f"leave `{one.name}` out of `passes`, or mend it; a pass returns `Rewritten(graph, matches)`",
        facts={"pass": one.name, "reason": reason, "diff": lines, **(facts or {})},
    )
