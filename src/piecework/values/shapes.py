"""Token-count ranges and the boxes that artifacts serve; torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from piecework.errors import OptionError


@dataclass(frozen=True, order=True)
class Range:
    """The closed interval of sizes [low, high]."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not (isinstance(self.low, int) and isinstance(self.high, int)) or not 1 <= self.low <= self.high:
            raise OptionError(
                f"range `({self.low}, {self.high})` is not an interval of sizes",
                hint="give two whole numbers with 1 <= low <= high",
            )

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @property
    def is_single(self) -> bool:
        return self.low == self.high


Box = Mapping[str, Range]


def format_box(box: Box) -> str:
    """Write a box as text, symbols in order: `s0=2-64,s1=1`; the empty box is `static`."""
    return ",".join(f"{name}={box[name]}" for name in sorted(box)) or "static"


def parse_box(text: str) -> dict[str, Range]:
    """Read back what `format_box` wrote."""
    if text == "static":
        return {}
    box: dict[str, Range] = {}
    for part in text.split(","):
        name, _, bounds = part.partition("=")
        box[name] = parse_range(bounds)
    return box


def parse_range(text: str) -> Range:
    """Read back what `str` of a range wrote."""
    low, _, high = text.partition("-")
    return Range(int(low), int(high or low))


def partition(ranges: Iterable[tuple[int, int]], single_sizes: Iterable[int], maximum: int) -> tuple[Range, ...]:
    """Cut [1, maximum] into the ranges that get an artifact each.

    Ranges are clipped to `maximum` and must stand side by side up to it; sizes below the first range are not served.
    Size 1 and every single size become ranges of their own: the compiler proves its code from size 2 on only.
    """
    wanted = sorted(Range(low, min(high, maximum)) for low, high in ranges if low <= maximum)
    edge = wanted[0].low - 1 if wanted else 0
    for item in wanted:
        if item.low != edge + 1:
            raise OptionError(
                f"ranges leave a gap or overlap at `{edge + 1}`: `{', '.join(map(str, wanted))}`",
                hint=f"ranges must cover [1, {maximum}] side by side, as in ((1, 64), (65, {maximum}))",
            )
        edge = item.high
    if edge < maximum:
        raise OptionError(
            f"ranges end at `{edge}`, below `max_num_batched_tokens={maximum}`",
            hint=f"extend the last range to {maximum}, or lower max_num_batched_tokens",
        )
    for size in single_sizes:
        if not wanted[0].low <= size <= maximum:
            raise OptionError(
                f"single size `{size}` lies outside [{wanted[0].low}, {maximum}]",
                hint="single_sizes must lie inside the ranges",
            )
    singles = {1, *single_sizes}
    return tuple(piece for item in wanted for piece in _cut_out(item, singles))


def _cut_out(item: Range, singles: set[int]) -> Iterable[Range]:
    low = item.low
    for size in sorted(size for size in singles if size in item):
        if low < size:
            yield Range(low, size - 1)
        yield Range(size, size)
        low = size + 1
    if low <= item.high:
        yield Range(low, item.high)


def box_for(symbols: Sequence[str], chosen: Mapping[str, Range]) -> Box:
    """Return the box of a piece whose own symbols `s0, s1, …` stand for these program symbols."""
    return {f"s{index}": chosen[symbol] for index, symbol in enumerate(symbols)}


def combinations(ranges: Mapping[str, Sequence[Range]]) -> list[dict[str, Range]]:
    """Return every choice of one range a symbol, the last symbol's changing fastest."""
    return [dict(zip(ranges, chosen, strict=True)) for chosen in itertools.product(*ranges.values())]


def clip(ranges: Mapping[str, Sequence[Range]], bounds: Mapping[str, Range]) -> dict[str, tuple[Range, ...]]:
    """Return what lies of each symbol's ranges within its bounds."""
    return {
        name: tuple(
            Range(max(cut.low, bounds[name].low), min(cut.high, bounds[name].high))
            for cut in cuts
            if cut.low <= bounds[name].high and cut.high >= bounds[name].low
        )
        for name, cuts in ranges.items()
    }


def hull(ranges: Mapping[str, Sequence[Range]]) -> dict[str, Range]:
    """Return for each symbol the one range from its lowest size to its highest."""
    return {name: Range(cuts[0].low, cuts[-1].high) for name, cuts in ranges.items()}


class _Region(Protocol):
    @property
    def piece(self) -> int: ...

    @property
    def symbols(self) -> tuple[str, ...]: ...


def boxes_of(regions: Iterable[_Region], every: Sequence[Mapping[str, Range]]) -> dict[int, dict[str, Box]]:
    """Return for each piece the boxes that its sites need, by their text."""
    found: dict[int, dict[str, Box]] = {}
    for region in regions:
        if region.piece >= 0:
            boxes = found.setdefault(region.piece, {})
            for chosen in every:
                box = box_for(region.symbols, chosen)
                boxes.setdefault(format_box(box), box)
    return found


class _Symbol(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def low(self) -> int: ...

    @property
    def high(self) -> int: ...


def symbol_ranges(symbols: Sequence[_Symbol], ranges: Sequence[Range]) -> dict[str, tuple[Range, ...]]:
    """Give every symbol its ranges: the first the ranges asked for, each other size 1 and all above."""
    maximum = ranges[-1].high
    found: dict[str, tuple[Range, ...]] = {}
    for index, symbol in enumerate(symbols):
        high = min(symbol.high or maximum, maximum)
        cuts = ranges if index == 0 else (Range(1, 1), *([Range(2, maximum)] if maximum > 1 else []))
        clipped = [
            Range(max(cut.low, symbol.low), min(cut.high, high))
            for cut in cuts
            if cut.low <= high and cut.high >= symbol.low
        ]
        if not clipped:
            raise OptionError(
                f"no size of dimension `{symbol.name}`, which is {symbol.low} or more, lies within 1 to {high}",
                hint="raise `max_num_batched_tokens`",
                facts={"dimension": symbol.name},
            )
        found[symbol.name] = tuple(clipped)
    return found
