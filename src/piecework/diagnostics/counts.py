"""How a program is cut, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.values.record import Record
from piecework.values.shapes import parse_range

# What is said of a model that is not compiled: nothing is cut.
EMPTY: Mapping[str, Any] = {
    "regions": 0,
    "opaque": 0,
    "inline": 0,
    "sites": 0,
    "distinct": 0,
    "ranges": [],
    "sizes": {},
    "artifacts": 0,
    "split_ops": [],
    "misses": [],
}


def count_regions(record: Record) -> dict[str, Any]:
    """Return how the graph is cut, in numbers, with the ranges of sizes and the operators that it is cut at.

    `ranges` are those of the first size, the token count; `sizes` are the ranges of each.
    """
    names = [symbol["name"] for symbol in record.symbols]
    cuts = [parse_range(text) for text in record.ranges[names[0]]] if names else []
    kinds = [region["kind"] for region in record.regions]
    artifacts = {key for piece in record.pieces for key in piece.artifacts.values()}
    return {
        "regions": len(kinds),
        "opaque": kinds.count("opaque"),
        "inline": kinds.count("inline"),
        "sites": kinds.count("piece"),
        "distinct": len(record.pieces),
        "ranges": [[cut.low, cut.high] for cut in cuts],
        "sizes": {name: list(record.ranges[name]) for name in names},
        "artifacts": len(artifacts),
        "split_ops": list(record.split_ops),
    }
