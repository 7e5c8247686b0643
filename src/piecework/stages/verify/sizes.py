"""At which sizes an artifact is tried: both ends of its box, and one between.

The upper end of a wide range would cost memory and time that nobody has at start-up. Where no row of any result depends
on another row of the inputs, 512 rows show what 8192 would; where rows depend on one another, the true end is taken as
far as its values fit a fixed number of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piecework.seam.evaluate import Change, evaluate, is_random, layouts
from piecework.seam.fx import PieceGraph
from piecework.stages.verify.beside import DEVICE_BYTES, own_inputs
from piecework.stages.verify.draw import Source, empty_inputs
from piecework.values.difference import copy_of
from piecework.values.shapes import Box
from piecework.values.signature import TensorSpec

MOST_ROWS = 512
_MOST_BYTES = 1 << 30  # of all values together that eager makes at a size
_MOST_WORK = 1 << 29  # rows times elements of weights, on a CPU
_AT_ONCE = 16  # times as much, where the CPU has only the reference to compute
_FEW = 6


def sizes_to_try(piece: PieceGraph, box: Box, source: Source) -> tuple[list[dict[str, int]], str]:
    """Return the sizes at which an artifact is tried, and whether rows are `independent` or `dependent`."""
    wide = [name for name, size in box.items() if size.high > max(MOST_ROWS, size.low)]
    for name in wide:
        if name not in source.independent:
            source.independent[name] = _rows_are_independent(piece, box, name, source)
    dependent = [name for name in wide if not source.independent[name]]
    tops = {name: size.high for name, size in box.items()}
    for name in wide:
        if name not in dependent:
            tops[name] = max(box[name].low, min(tops[name], MOST_ROWS))
    for name in wide:
        tops[name] = max(box[name].low, min(tops[name], _affordable_rows(piece, source)))
    tops = _fitting(piece, box, tops)
    low = {name: size.low for name, size in box.items()}
    between = {name: _between(low[name], tops[name]) for name in box}
    points = [dict(items) for items in dict.fromkeys(tuple(point.items()) for point in (low, between, tops))]
    return points, "dependent" if dependent else "independent"


def _between(low: int, top: int) -> int:
    """Return an odd size near the geometric middle: one that no vector width and no block divides."""
    return max(low, min(top, math.isqrt(low * top) | 1))


def _affordable_rows(piece: PieceGraph, source: Source) -> int:
    """Return how many rows a CPU may be given: the artifact's, or the reference of one whose weights fill a GPU."""
    weights = [s for _, s in piece.parameters if isinstance(s, TensorSpec) and s.is_weight and len(s.shape) > 1]
    elements = sum(math.prod(int(size) for size in spec.shape) for spec in weights if spec.device == "cpu")
    elsewhere = sum(math.prod(int(size) for size in spec.shape) for spec in weights if spec.device != "cpu")
    if source.is_drawn and elsewhere * 4 > DEVICE_BYTES:
        return max(2, _AT_ONCE * _MOST_WORK // elsewhere)
    return max(2, _MOST_WORK // max(1, elements))


def _fitting(piece: PieceGraph, box: Box, tops: Mapping[str, int]) -> dict[str, int]:
    """Halve the upper sizes until all values that eager makes there fit."""
    here = dict(tops)
    while any(size > max(box[name].low, MOST_ROWS) for name, size in here.items()):
        found, is_whole = layouts(piece, empty_inputs(piece, here))
        if is_whole and sum(layout.size_bytes for layout in found.values()) <= _MOST_BYTES:
            return here
        here = {
            name: max(box[name].low, MOST_ROWS, size // 2) if size > MOST_ROWS else size for name, size in here.items()
        }
        if not is_whole:  # what depends on data has no layout beforehand
            return {name: max(box[name].low, min(size, MOST_ROWS)) for name, size in here.items()}
    return here


def _rows_are_independent(piece: PieceGraph, box: Box, symbol: str, source: Source) -> bool:
    """Change some rows of every input along a symbol, and see whether other rows of any result change with them.

    Eager's text serves any size, so this is done on a few rows. A size that is computed from the symbol tells nothing
    of rows: then they count as dependent.
    """
    sizes = {name: _FEW + number for number, name in enumerate(box)}
    if is_random(piece):
        return False
    count, changed = sizes[symbol], torch.tensor([1, 4])
    try:
        values, other = source.draw(sizes, seed=1), source.draw(sizes, seed=2)
        for position, (_, spec) in enumerate(piece.parameters):
            if not isinstance(spec, TensorSpec) or spec.is_weight:
                continue
            if any(symbol in str(size) and size != symbol for size in spec.shape):
                return False
            other[position] = _with_rows(values[position], other[position], spec, symbol, changed)
        before = evaluate(piece, own_inputs(piece, values), Change(fill=1.0))
        after = evaluate(piece, own_inputs(piece, other), Change(fill=1.0))
        more = source.draw({**sizes, symbol: count + 1})
        longer = evaluate(piece, own_inputs(piece, more), Change(fill=1.0))
        dims = [_row_dim(one, two, count) for one, two in zip(before, longer, strict=True)]
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    kept = torch.tensor([row for row in range(count) if row not in changed.tolist()])
    return all(
        dim is not None and _is_kept(one, two, dim, kept) for one, two, dim in zip(before, after, dims, strict=True)
    )


def _with_rows(value: Tensor, other: Tensor, spec: TensorSpec, symbol: str, rows: Tensor) -> Tensor:
    mixed = copy_of(value)
    for dim, size in enumerate(spec.shape):
        if size == symbol:
            mixed.index_copy_(dim, rows.to(value.device), other.index_select(dim, rows.to(value.device)))
    return mixed


def _row_dim(one: Any, longer: Any, count: int) -> int | None:
    """Return the dimension of a result that follows a symbol, -1 where none does; None where that is not plain."""
    if not isinstance(one, Tensor) or not isinstance(longer, Tensor):
        return -1
    varying = [dim for dim, (a, b) in enumerate(zip(one.shape, longer.shape, strict=True)) if a != b]
    if len(varying) > 1 or any(one.shape[dim] != count for dim in varying):
        return None
    return varying[0] if varying else -1


def _is_kept(one: Any, two: Any, dim: int, kept: Tensor) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(one == two)
    rows = kept.to(one.device)
    left, right = (one, two) if dim < 0 else (one.index_select(dim, rows), two.index_select(dim, rows))
    return torch.equal(left.nan_to_num(), right.nan_to_num()) if left.is_floating_point() else torch.equal(left, right)
