"""A program as plain data: what is cut where and who declared it, which pieces are equal, what is stored for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from piecework.api.folder import folder_request
from piecework.api.location import locate
from piecework.diagnostics.counts import EMPTY
from piecework.diagnostics.cuts import count_cuts, cuts_of
from piecework.errors import ArtifactMissing, CorruptEntry
from piecework.events import Observer, ignore
from piecework.models.folder import open_folder
from piecework.options import CompileOptions
from piecework.parallel.wire import count_collectives, sent_bytes
from piecework.pipeline import build
from piecework.stages.evidence import why_stale
from piecework.stages.find import find_record
from piecework.store.memory import MemoryStore
from piecework.store.protocol import ARTIFACT, SharedStore, Store
from piecework.values.artifact import TEXT, Artifact, Compiler, keeping_apart
from piecework.values.record import Record, decode_evidence
from piecework.values.shapes import Box
from piecework.values.sources import readable_source, readable_value

__all__ = ["EMPTY", "explain_guards", "explain_record", "find_or_plan"]


class NamedOnly:
    """Stand for a compiler by its name and version, so that artifacts get their keys; compile nothing."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self.name = compiler.name
        self.version = compiler.version

    def keeping_apart(self, operators: Sequence[str]) -> NamedOnly:
        """Stand for the compiler as it is for pieces with opaque operators inside."""
        return NamedOnly(keeping_apart(self._compiler, operators))

    def compile(self, text: str, box: Box) -> Artifact:
        """Return the text itself."""
        return Artifact(TEXT, text)


def find_or_plan(
    model: str,
    *,
    dtype: str,
    device: str,
    options: CompileOptions,
    store: SharedStore,
    observer: Observer,
    offline: bool,
) -> tuple[str, Record, SharedStore]:
    """Return a folder's record, its key and where it is: the store's, or one traced and cut here without compiling.

    A record made here has the keys that its artifacts would have; the given store gets nothing of it.
    """
    folder = open_folder(locate(model, offline=offline))
    request = folder_request(folder, dtype, device, options)
    found = find_record(
        request.factors, store, observer, lambda r: why_stale(r.sources, lambda: store.read_blob(r.evidence), None)
    )
    if found is not None:
        return (*found, store)
    only = NamedOnly(request.compiler)
    planned = MemoryStore()
    return (*build(replace(request, compiler=only), planned, ignore), planned)


def explain_record(key: str, record: Record, where: Store, store: Store) -> dict[str, Any]:
    """Return a record as plain data; its texts lie in `where`, and artifacts are looked for in `store`."""
    pieces = [_explain_piece(number, record, where, store) for number in range(len(record.pieces))]
    cuts = cuts_of(record, store)
    missing = [
        {"piece": piece["number"], "range": box, "artifact": artifact["key"]}
        for piece in pieces
        for box, artifact in piece["artifacts"].items()
        if not artifact["is_stored"]
    ]
    return {
        "key": key,
        "is_stored": where is store,
        **count_cuts(record, store),
        "cuts_by_range": {box: each.counts() for box, each in cuts.items() if box},
        "declared_by": dict(record.operators),
        "pieces": pieces,
        "passes": [dict(report) for report in record.notes.get("passes", ())],
        "operators": dict(record.factors["code"].get("operators", {})),
        "cuts": [dict(region) for region in next(iter(cuts.values())).regions],
        "missing_artifacts": missing,
        "bytes": sum(_size_of_each(pieces).values()),
        "inputs": [{"path": leaf["path"], "spec": leaf["spec"]} for leaf in record.inputs],
        **_explain_ranks(record),
        "weights": sum(binding["kind"] == "weight" for binding in record.values.values()),
        "sources": [f"{source.package}/{source.path}" for source in record.sources],
    }


def _explain_ranks(record: Record) -> dict[str, Any]:
    """Return who shares the model, where several ranks do, and what one of them sends in a step."""
    ranks = record.factors["config"]["options"].get("tensor_parallel_size", 1)
    if ranks < 2:
        return {}
    sizes = {symbol["name"]: 64 for symbol in record.symbols}
    sites = [site for site in record.notes.get("sites", ()) if "num_kv_heads" in site]
    return {
        "ranks": {
            "count": ranks,
            "collectives": count_collectives(record.notes),
            "kv_heads": sites[0]["num_kv_heads"] if sites else 0,
            "sent_bytes_of_64_tokens": sent_bytes(record.notes, sizes),
        }
    }


def explain_guards(record: Record, where: Store) -> dict[str, Any]:
    """Return what the trace took for granted: conditions on sizes, and Python values with the line that read them."""
    evidence = decode_evidence(where.read_blob(record.evidence))
    return {
        "shape_guards": [dict(guard) for guard in record.shape_guards],
        "facts": [
            {
                "what": readable_source(f.source),
                "kind": f.kind,
                "value": readable_value(f.kind, f.value),
                "line": f.line,
                "source": f.source,
            }
            for f in evidence.facts
        ],
        "functions": [f"{code.module}.{code.qualname}" for code in evidence.code],
    }


def _explain_piece(number: int, record: Record, where: Store, store: Store) -> dict[str, Any]:
    piece = record.pieces[number]
    sites = [i for i, region in enumerate(record.regions) if region["kind"] == "piece" and region["piece"] == number]
    text = where.read_blob(piece.text).decode()
    return {
        "number": number,
        "digest": piece.text,
        "sites": len(sites),
        "regions": sites,
        "calls": sum(" = " in line for line in text.splitlines()),
        "artifacts": {box: _explain_artifact(key, store) for box, key in piece.artifacts.items()},
    }


def _explain_artifact(key: str, store: Store) -> dict[str, Any]:
    try:
        record = store.read_record(ARTIFACT, key)
        return {
            "key": key,
            "is_stored": True,
            "kind": record["kind"],
            "compiler": record["factors"]["compiler"]["name"],
            "size_bytes": record["size_bytes"],
            "kernels": len(record["kernels"]),
            "guards": list(record["guards"]),
            "fall_back": str(record["facts"].get("fall_back", "")),
            "verified": str(record["facts"].get("verified", "")),
            "passes": [dict(report) for report in record["facts"].get("passes", ())],
        }
    except (ArtifactMissing, CorruptEntry):
        return {"key": key, "is_stored": False}


def _size_of_each(pieces: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    artifacts = [artifact for piece in pieces for artifact in piece["artifacts"].values()]
    return {artifact["key"]: artifact.get("size_bytes", 0) for artifact in artifacts}
