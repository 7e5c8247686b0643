"""What a step sends over the wire, counted from the record: bytes that one rank sends, by the ring algorithms.

A ring sends (R - 1)/R of a tensor to gather it, as much to reduce and scatter it, and twice that for an all-reduce. A
library that does it in another way (a tree, for few bytes) sends no less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from piecework.seam.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from piecework.values.predicate import NUMBERS, evaluate


def sent_bytes(notes: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Return the bytes that one rank sends in a step of these sizes; 0 for a program of one rank."""
    return sum(_sent(each, sizes) for each in notes.get("collectives", ()))


def count_collectives(notes: Mapping[str, Any]) -> dict[str, int]:
    """Return how many collectives of each kind a step has, by their short names."""
    found: dict[str, int] = {}
    for each in notes.get("collectives", ()):
        name = str(each["operator"]).partition("::")[2]
        found[name] = found.get(name, 0) + each["count"]
    return found


def _sent(each: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    counts = [size if isinstance(size, int) else int(evaluate(size, sizes, NUMBERS)) for size in each["shape"]]
    result_bytes = math.prod(counts) * getattr(torch, each["dtype"]).itemsize
    ranks: int = each["ranks"]
    share = {
        ALL_REDUCE: 2 * (ranks - 1) * result_bytes // ranks,
        ALL_GATHER: (ranks - 1) * result_bytes // ranks,
        REDUCE_SCATTER: (ranks - 1) * result_bytes,
    }
    return int(share.get(each["operator"], 0) * each["count"])
