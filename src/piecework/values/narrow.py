"""Where an artifact assumes more of sizes than its box says: the part that it serves, and what is left; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from piecework.values.predicate import NUMBERS, UnknownExpression, evaluate, holds_by_intervals, names_in
from piecework.values.shapes import Box, Range, boxes_of, combinations, parse_box

MOST_PARTS = 8
_MOST_PAIRS = 1 << 16
_MOST_RUNS = 4  # a guard whose truth changes more often is not one of ends: `s0 % 8 == 0`


@dataclass(frozen=True)
class Part:
    """A part of a box, and the key of the artifact that serves it."""

    box: Box
    key: str


def kept_box(guards: Sequence[str], box: Box) -> Box | None:
    """Return the widest part of `box` in which all guards hold; None where a guard cannot cut a box so."""
    kept = dict(box)
    try:
        several = []
        for guard in guards:
            names = [name for name in names_in(guard) if not (name in kept and kept[name].is_single)]
            if any(name not in kept for name in names):
                return None
            if len(names) > 1:
                several.append(guard)
                continue
            found = _stretch(guard, names[0] if names else "", kept)
            if found is None:
                return None
            kept |= {names[0]: found} if names else {}
        return kept if all(_holds(guard, kept) for guard in several) else None
    except (UnknownExpression, ZeroDivisionError):
        return None


def _stretch(guard: str, name: str, box: Box) -> Range | None:
    """Return the longest run of sizes of one name in which a guard holds."""
    fixed = {other: size.low for other, size in box.items()}
    if not name:
        return Range(1, 1) if evaluate(guard, fixed, NUMBERS) else None
    best: Range | None = None
    start, runs = 0, 0
    low, high = box[name].low, box[name].high
    for size in range(low, high + 2):
        if size <= high and evaluate(guard, {**fixed, name: size}, NUMBERS):
            start = start or size
        elif start:
            runs += 1
            run = Range(start, size - 1)
            if best is None or run.high - run.low > best.high - best.low:
                best = run
            start = 0
    return best if runs <= _MOST_RUNS else None


def _holds(guard: str, box: Box) -> bool:
    names = names_in(guard)
    if holds_by_intervals(guard, {name: (box[name].low, box[name].high) for name in names}):
        return True
    spans = [range(box[name].low, box[name].high + 1) for name in names]
    count = 1
    for span in spans:
        count *= len(span)
    if count > _MOST_PAIRS:
        return False
    return all(evaluate(guard, dict(zip(names, sizes, strict=True)), NUMBERS) for sizes in product(*spans))


def rest_of(box: Box, kept: Box) -> list[Box]:
    """Cut what `kept` leaves of `box` into boxes: below and above it, one name after the other."""
    boxes: list[Box] = []
    here = dict(box)
    for name, own in kept.items():
        if here[name].low < own.low:
            boxes.append({**here, name: Range(here[name].low, own.low - 1)})
        if own.high < here[name].high:
            boxes.append({**here, name: Range(own.high + 1, here[name].high)})
        here[name] = own
    return boxes


class _Region(Protocol):
    @property
    def piece(self) -> int: ...

    @property
    def symbols(self) -> tuple[str, ...]: ...


Parts = Mapping[tuple[int, str], Sequence[Part]]


def refine(
    ranges: Mapping[str, Sequence[Range]], regions: Iterable[_Region], parts: Parts
) -> dict[str, tuple[Range, ...]]:
    """Cut a program's ranges where a piece's box was cut: one choice of ranges then meets one artifact a piece."""
    cuts: dict[str, set[int]] = {name: set() for name in ranges}
    by_piece: dict[int, set[tuple[str, int]]] = {}
    for (number, text), found in parts.items():
        whole = parse_box(text)
        inner = {(name, size.low) for part in found for name, size in part.box.items() if size.low > whole[name].low}
        by_piece.setdefault(number, set()).update(inner)
    for region in regions:
        for name, low in by_piece.get(region.piece, ()):
            cuts[region.symbols[int(name[1:])]].add(low)
    return {name: tuple(_cut(every, cuts[name])) for name, every in ranges.items()}


def _cut(ranges: Sequence[Range], lows: set[int]) -> Iterable[Range]:
    for item in ranges:
        edges = sorted({item.low, *(low for low in lows if item.low < low <= item.high)})
        for low, following in zip(edges, [*edges[1:], item.high + 1], strict=True):
            yield Range(low, following - 1)


def assign(
    ranges: Mapping[str, Sequence[Range]], regions: Sequence[_Region], parts: Parts
) -> dict[tuple[int, str], str]:
    """Return the artifact's key for each piece and each of the boxes that its sites need under refined ranges."""
    assigned = {}
    for number, boxes in boxes_of(regions, combinations(ranges)).items():
        own = [part for (piece, _), found in parts.items() if piece == number for part in found]
        for text, box in boxes.items():
            assigned[number, text] = next(part.key for part in own if _holds_box(part.box, box))
    return assigned


def _holds_box(outer: Box, inner: Box) -> bool:
    return all(outer[name].low <= size.low and size.high <= outer[name].high for name, size in inner.items())
