"""What a page shows of a run: its events joined with the programs' records, texts and artifacts in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecework.diagnostics.attribution import attribute
from piecework.diagnostics.cuts import cuts_of
from piecework.diagnostics.explain import explain_guards
from piecework.diagnostics.explain_text import proof_text
from piecework.diagnostics.report.artifacts import artifact_views
from piecework.diagnostics.report.waterfall import waterfall
from piecework.diagnostics.run_file import Run
from piecework.diagnostics.traffic.model import LABEL, Traffic
from piecework.diagnostics.traffic.step import record_traffic, step_sizes
from piecework.errors import ArtifactMissing, CorruptEntry, PieceworkError
from piecework.stages.find import read_program, with_siblings
from piecework.store.protocol import PROGRAM, SharedStore
from piecework.values.graph import BY_COMPILER
from piecework.values.record import Record
from piecework.values.shapes import Range, parse_range
from piecework.values.view import (
    GuardView,
    PieceView,
    ProgramView,
    RegionView,
    View,
    captures_of,
    misses_of,
    served_counts,
    verdicts_of,
)

_MANY_FACTS = 200


def collect(run: Run, store: SharedStore, *, title: str = "") -> View:
    """Return the view of a run; programs that the store does not hold are left out."""
    programs = []
    for key in _keys(run):
        try:
            records = with_siblings(read_program(key, store), store)
        except (ArtifactMissing, CorruptEntry):
            continue
        programs += [_program(key, record, run, store) for record in records]
    skipped = tuple(
        (event["phase"], event["size"], f"{event['predicted_bytes']:,} bytes of a budget of {event['budget_bytes']:,}")
        for event in run.of("CaptureSkipped")
    ) + tuple((event["phase"], event["size"], event["reason"]) for event in run.of("CaptureFailed"))
    return View(
        title=title or _title(run),
        wall_s=run.wall_ns / 1e9,
        ready_s=run.ready_ns / 1e9,
        explained=attribute(run).explained,
        bars=waterfall(run),
        about=_about(run),
        programs=tuple(programs),
        misses=misses_of(run.events),
        captures=captures_of(run.events),
        skipped=skipped,
        verdicts=verdicts_of(run.events),
        counters=run.facts.get("counters", {}),
    )


def _keys(run: Run) -> list[str]:
    """Return the programs' keys: of those that became ready, else of those that were found, else of those written."""
    # The first of several sides names the others, and is written last.
    written = [event["name"] for event in run.of("StoreWrite") if event["kind"] == PROGRAM][-1:]
    found = [event["key"] for event in run.of("RecordHit")]
    return list(dict.fromkeys(key for key in run.facts.get("keys", ()) or found or written if key))


def _title(run: Run) -> str:
    return " ".join(run.facts.get("command", ())) or "a run from Python"


def _about(run: Run) -> dict[str, str]:
    facts = run.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    return {
        name: value
        for name, value in (
            ("command", " ".join(facts.get("command", ()))),
            ("started", str(facts.get("started_at", ""))),
            ("system", str(facts.get("system", ""))),
            ("versions", versions),
        )
        if value
    }


def _program(key: str, record: Record, run: Run, store: SharedStore) -> ProgramView:
    ranges = {name: tuple(cuts) for name, cuts in record.ranges.items()}
    cuts = [parse_range(text) for text in next(iter(ranges.values()), ())]
    captures = captures_of(run.events)
    where = next(iter(cuts_of(record, store).values()))
    return ProgramView(
        key=key,
        regions=tuple(_region(region, record.partition) for region in where.regions),
        pieces=tuple(_piece(number, record, run, store) for number in range(len(record.pieces))),
        ranges=ranges,
        served=served_counts(cuts, captures),
        guards=tuple(
            GuardView(guard["expression"], guard["line"] or "taken for granted by the tracer", proof_text(guard))
            for guard in record.shape_guards
        ),
        facts=_facts(record, store),
        factors=record.factors,
        traffic=_traffic(record, cuts, store),
    )


def _facts(record: Record, store: SharedStore) -> tuple[tuple[str, str, str], ...]:
    found = explain_guards(record, store)["facts"]
    return tuple((fact["what"], fact["value"], fact["line"]) for fact in found[:_MANY_FACTS])


def _region(region: Mapping[str, Any], partition: str) -> RegionView:
    if region["kind"] == "piece" and partition == BY_COMPILER:
        return RegionView(region["region"], "piece", 0, f"part {region['piece']} of piece 0")
    if region["kind"] == "piece":
        return RegionView(region["region"], "piece", region["piece"], f"piece {region['piece']}")
    return RegionView(region["region"], region["kind"], -1, " + ".join(region["calls"]))


def _piece(number: int, record: Record, run: Run, store: SharedStore) -> PieceView:
    piece = record.pieces[number]
    regions = [i for i, region in enumerate(record.regions) if region["kind"] == "piece" and region["piece"] == number]
    text = store.read_blob(piece.text).decode()
    return PieceView(number, piece.text, text, tuple(regions), artifact_views(number, piece, run, store))


def _traffic(record: Record, cuts: Sequence[Range], store: SharedStore) -> tuple[Mapping[str, Any], ...]:
    """Return the traffic of a small and of a large step; none where the graph's sizes cannot be told."""
    if not cuts:
        return ()
    found = []
    for tokens in dict.fromkeys((cuts[0].low, min(256, cuts[-1].high))):
        try:
            found.append(_summary(record_traffic(record, store, step_sizes(tokens)), tokens))
        except PieceworkError:
            return ()
    return tuple(found)


def _summary(traffic: Traffic, tokens: int) -> dict[str, Any]:
    return {
        "label": LABEL,
        "tokens": tokens,
        "step": traffic.step,
        "weight_bytes": traffic.weight_bytes,
        "kv_read_bytes": traffic.kv_read_bytes,
        "kv_written_bytes": traffic.kv_written_bytes,
        "sites": [
            {"name": one.name, "sites": one.sites, "columns": one.columns, "operators": len(one.operators),
             "kernels": len(one.groups)}
            for one in traffic.sites
        ],
    }  # fmt: skip
