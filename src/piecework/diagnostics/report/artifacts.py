"""The artifacts of a piece as a run met them: compiled, reused or loaded, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from piecework.diagnostics.run_file import Run
from piecework.errors import ArtifactMissing, CorruptEntry
from piecework.store.protocol import ARTIFACT, Store
from piecework.values.key import differing
from piecework.values.record import PieceRecord
from piecework.values.view import ArtifactView

_LOOKED_AT = 300
_MOST_CODE = 60_000  # characters of one artifact's code on the page
_OUTCOMES = {"ArtifactCompiled": "compiled", "ArtifactReused": "reused", "ArtifactLoaded": "loaded"}


def artifact_views(number: int, piece: PieceRecord, run: Run, store: Store) -> tuple[ArtifactView, ...]:
    """Return the artifacts of one piece, by range."""
    events: dict[str, Mapping[str, Any]] = {}
    for event in run.events:
        # What was compiled is loaded afterwards: the first word is the one that matters.
        if event["event"] in _OUTCOMES:
            events.setdefault(event["key"], event)
    return tuple(_view(number, box, key, events.get(key), run, store) for box, key in piece.artifacts.items())


def _view(
    number: int, box: str, key: str, event: Mapping[str, Any] | None, run: Run, store: Store
) -> ArtifactView:
    outcome = _OUTCOMES[event["event"]] if event else "not met"
    elapsed_s = (event["end_ns"] - event["start_ns"]) / 1e9 if event else 0.0
    try:
        record = store.read_record(ARTIFACT, key)
        code = store.read_blob(record["text"]).decode()
    except (ArtifactMissing, CorruptEntry) as error:
        return ArtifactView(key, number, box, outcome, error.message, elapsed_s=elapsed_s)
    shown = code if len(code) <= _MOST_CODE else code[:_MOST_CODE].rpartition("\n")[0] + "\n# … cut here"
    return ArtifactView(
        key=key,
        piece=number,
        range=box,
        outcome=outcome,
        reason=_why(outcome, record, {one["key"] for one in run.of("ArtifactCompiled")}, store),
        compiler=record["factors"]["compiler"]["name"],
        size_bytes=record["size_bytes"],
        elapsed_s=elapsed_s,
        kernels=len(record["kernels"]),
        guards=tuple(record["guards"]),
        verified=str(record["facts"].get("verified", "")),
        fall_back=str(record["facts"].get("fall_back", "")),
        code=shown,
        code_lines=len(code.splitlines()),
    )


def _why(outcome: str, record: Mapping[str, Any], made: Collection[str], store: Store) -> str:
    if outcome == "loaded":
        return "its key was in the store"
    if outcome == "reused":
        return "another start had compiled it: the same text, range and tools"
    if outcome == "not met":
        return "this run did not need it"
    nearest = _nearest(made, record["factors"], store)
    return f"nothing was stored under its key; the nearest differs in {nearest}" if nearest else (
        "nothing was stored under its key, and nothing like it"
    )


def _nearest(made: Collection[str], factors: Mapping[str, Any], store: Store) -> str:
    """Say in which factors the nearest other artifact differs; those that this run made were not there to be found."""
    best: list[str] = []
    for other in store.list_records(ARTIFACT)[-_LOOKED_AT:]:
        if other in made:
            continue
        try:
            found = differing(store.read_record(ARTIFACT, other)["factors"], factors)
        except (ArtifactMissing, CorruptEntry, KeyError):
            continue
        if found and (not best or len(found) < len(best)):
            best = found
    return "; ".join(best[:4])
