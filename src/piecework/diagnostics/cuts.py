"""Where a program is cut: before it was compiled, as its record says, or in what was compiled of the whole graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.diagnostics.counts import count_regions
from piecework.errors import ArtifactMissing, CorruptEntry
from piecework.seam.cut_text import TextRegion
from piecework.seam.loader import regions_of
from piecework.store.protocol import ARTIFACT, Store
from piecework.values.artifact import Artifact
from piecework.values.graph import BY_COMPILER, OPAQUE, PIECE, inside
from piecework.values.record import Record
from piecework.values.syntax import parse_python

_STATIC = re.compile(r"[wc]\d+")  # weights, and the views of them that were made once


@dataclass(frozen=True)
class Cuts:
    """Regions in order: `{"region": 0, "kind": "piece", "piece": 0}`, or the operators that are called as `calls`."""

    regions: tuple[Mapping[str, Any], ...]

    def counts(self) -> dict[str, int]:
        """Return the regions by kind, and the distinct pieces."""
        kinds = [region["kind"] for region in self.regions]
        pieces = {region["piece"] for region in self.regions if region["kind"] == PIECE}
        return {
            "regions": len(kinds),
            "opaque": kinds.count(OPAQUE),
            "inline": kinds.count("inline"),
            "sites": kinds.count(PIECE),
            "distinct": len(pieces),
        }


def cuts_of(record: Record, store: Store) -> dict[str, Cuts]:
    """Return where a program is cut for each box of the one piece that was compiled whole, else once, under "".

    Artifacts that are not stored, and those that have no text, are left out.
    """
    if record.partition != BY_COMPILER or len(record.pieces) != 1:
        return {"": Cuts(tuple(_record_regions(record.regions)))}
    found = {}
    for box, key in record.pieces[0].artifacts.items():
        try:
            stored = store.read_record(ARTIFACT, key)
            whole = Artifact(stored["kind"], store.read_blob(stored["text"]).decode())
            parts = regions_of(whole, inside(record.partition, record.split_ops))
        except (ArtifactMissing, CorruptEntry):
            continue
        if parts:
            found[box] = Cuts(tuple(_text_regions(parts)))
    return found or {"": Cuts(tuple(_record_regions(record.regions)))}


def count_cuts(record: Record, store: Store) -> dict[str, Any]:
    """Return how a program is cut, in numbers, as `count_regions` does; `partition` says when."""
    counts = next(iter(cuts_of(record, store).values())).counts()
    return {**count_regions(record), **counts, "partition": record.partition}


def _record_regions(regions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, region in enumerate(regions):
        if region["kind"] == PIECE:
            found.append({"region": index, "kind": PIECE, "piece": region["piece"]})
        else:
            calls = [call["operator"] for call in region["calls"]]
            found.append({"region": index, "kind": region["kind"], "calls": calls})
    return found


def _text_regions(parts: Sequence[TextRegion]) -> list[dict[str, Any]]:
    """Give the pieces of a text numbers; those that differ in names alone are one piece."""
    numbers: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        if part.kind == PIECE:
            number = numbers.setdefault(_canonical(part), len(numbers))
            found.append({"region": index, "kind": PIECE, "piece": number})
        else:
            found.append({"region": index, "kind": OPAQUE, "calls": list(part.operators)})
    return found


def _canonical(part: TextRegion) -> str:
    """Write a region with its values and weights named by first use."""
    tree = parse_python(part.source)
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own.update(part.arguments)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in own or _STATIC.fullmatch(node.id)):
            node.id = names.setdefault(node.id, f"n{len(names)}")
        elif isinstance(node, ast.arg):
            node.arg = names.setdefault(node.arg, f"n{len(names)}")
    return ast.unparse(tree)
