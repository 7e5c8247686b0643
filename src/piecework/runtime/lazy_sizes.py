"""Sizes that get artifacts of their own once they are met; until those are there, the general ones serve.

What compiles is a callable that was handed in: nothing here knows a compiler. It runs in a thread of its own, never in
a step, and once for each size, however many threads meet the size together. Where it fails the size stays general.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.values.artifact import LoadedPiece
from piecework.values.shapes import Range

Run = Callable[..., Any]
Loaded = Mapping[tuple[int, str], LoadedPiece]


@dataclass(frozen=True)
class OnDemand:
    """What a bound program asks for artifacts of single sizes.

    `sizes` are those that may be asked for. `load(record, size)` returns the pieces of a size, by piece and box, or
    None where it could not make them; it is called in a thread and raises nothing. `is_allowed()` tells whether it may
    be called now. `ready(size, start_ns)` hears that a size is served by its own artifacts from now on.
    """

    sizes: tuple[int, ...]
    load: Callable[[Any, int], Loaded | None]
    is_allowed: Callable[[], bool]
    ready: Callable[[int, int], None]


def add_sizes(
    runs: list[Run],
    record: Any,
    ranges: Mapping[str, Sequence[Range]],
    make: Callable[[Loaded, Mapping[str, Sequence[Range]]], Sequence[Run]],
    on_demand: OnDemand | None,
) -> tuple[int, ...]:
    """Append to `runs` those of the first symbol's sizes that are made when they are met; return these sizes.

    `make(pieces, ranges)` binds pieces for every choice of ranges. Sizes that have an artifact of their own already,
    and those outside the ranges, are left out.
    """
    first = next(iter(ranges), None)
    if on_demand is None or first is None:
        return ()
    cuts = {
        size: index
        for size in on_demand.sizes
        for index, cut in enumerate(ranges[first])
        if size in cut and not cut.is_single
    }

    def own(size: int) -> Sequence[Run] | None:
        pieces = on_demand.load(record, size)
        return None if pieces is None else make(pieces, {**ranges, first: (Range(size, size),)})

    LazySizes(runs, cuts, len(runs) // len(ranges[first]), own, on_demand)
    return tuple(cuts)


class LazySizes:
    """Appends to `runs` those of each size: general ones at first, which ask `make` for the size's own.

    A program's runs lie by the first symbol's cut, then by the other symbols' (`stride` of them). A size is one more
    cut of the first symbol; it begins as the cut that it lies in (`cuts`).
    """

    def __init__(
        self,
        runs: list[Run],
        cuts: Mapping[int, int],
        stride: int,
        make: Callable[[int], Sequence[Run] | None],
        on_demand: OnDemand,
    ) -> None:
        self._runs = runs
        self._make = make
        self._on_demand = on_demand
        self._stride = stride
        self._first: dict[int, int] = {}
        self._asked: set[int] = set()
        self._lock = threading.Lock()
        for size, cut in cuts.items():
            self._first[size] = len(runs)
            general = runs[cut * stride : (cut + 1) * stride]
            runs.extend([self._asking(size, run) for run in general])

    def _asking(self, size: int, general: Run) -> Run:
        def ask(*values: Any) -> Any:
            self._ask(size)
            return general(*values)

        ask.general = getattr(general, "general", general)  # type: ignore[attr-defined]  # what a capture takes apart
        return ask

    def _ask(self, size: int) -> None:
        """Start the thread that makes a size's own runs, unless one was started or compiling is forbidden now."""
        if size in self._asked or not self._on_demand.is_allowed():
            return
        with self._lock:
            if size in self._asked:
                return
            self._asked.add(size)
        threading.Thread(target=self._prepare, args=(size,), name=f"piecework-size-{size}").start()

    def _prepare(self, size: int) -> None:
        start_ns = time.perf_counter_ns()
        own = self._make(size)
        if own is None:
            if not self._on_demand.is_allowed():
                self._asked.discard(size)  # it was forbidden half-way: a later call may ask again
            return
        first = self._first[size]
        self._runs[first : first + self._stride] = own
        self._on_demand.ready(size, start_ns)
