"""Audit: every condition on sizes that a trace relied on is proven over the declared sizes, or a side is cut off.

A program installs no guards, so each must hold for every size that it will be called with. Where one holds on a
stretch of sizes only (`tokens > 16`), the trace serves that stretch and the rest is traced anew, until every size is
served; a condition that changes too often for that (`tokens % 8 == 0`) is an error that names the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from piecework.errors import GuardError, TraceError
from piecework.values.graph import ShapeGuard, TracedGraph
from piecework.values.many_sizes import certain, truth
from piecework.values.predicate import NUMBERS, UnknownExpression, evaluate, holds_by_intervals, names_in
from piecework.values.shapes import Range

MOST_SIDES = 8
_MOST_PAIRS = 1 << 22
_SAMPLE = 1 << 20
Bounds = Mapping[str, Range]

EVERY_SIZE, EVERY_PAIR, INTERVALS, SAMPLE = "every size", "every pair", "intervals", "sample"


@dataclass(frozen=True)
class Proof:
    """How a condition was shown to hold within bounds: at every size, at every pair, by intervals, or on a sample.

    `kept` are the bounds within which it holds, where they are narrower than those asked for.
    """

    expression: str
    line: str
    method: str
    checked: int
    kept: Bounds = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One trace, the bounds within which it is right, and the proofs of its conditions."""

    bounds: Bounds
    traced: TracedGraph
    proofs: tuple[Proof, ...]


class _Doubtful(Exception):
    """A condition compares floats that come out all but equal at the very size of the trace."""

    def __init__(self, proof: Proof, single: Bounds) -> None:
        super().__init__()
        self.proof = proof
        self.single = single


def trace_sides(trace: Callable[[Bounds], TracedGraph], bounds: Bounds, *, may_split: bool) -> tuple[Side, ...]:
    """Trace until every size within `bounds` is served by a graph that is right there; the widest side comes first.

    Raises GuardError where a condition holds for some sizes only and cannot, or may not, split them.
    """
    waiting: list[Bounds] = [bounds]
    sides: list[Side] = []
    while waiting:
        here = waiting.pop(0)
        try:
            traced = trace(here)
        except TraceError as error:
            if not sides:
                raise
            raise _unserved(error, here, sides[0].bounds) from error
        except GuardError:
            if not may_split or not 2 <= _width(here) <= MOST_SIDES - len(sides) - len(waiting):
                raise
            waiting += _singles(here)  # few sizes that the model tells apart: none stands for another
            continue
        try:
            proofs = tuple(prove(guard, here, traced.sizes) for guard in traced.shape_guards)
        except _Doubtful as found:
            if not may_split or found.single == here:
                raise _refusal(found.proof, here, "what it compares is too close to call there", _ADVICE) from None
            waiting += [found.single, *_rest(here, found.single)]  # a size alone is Python's own number, not torch's
            _refuse_many(sides, waiting, bounds, found.proof)
            continue
        kept = _intersection(here, proofs)
        if kept != here and not may_split:
            proof = next(proof for proof in proofs if proof.kept)
            raise _refusal(proof, here, "splitting at it is switched off", "let split_at_guards be, or change the line")
        sides.append(Side(kept, traced, proofs))
        waiting.extend(_rest(here, kept))
        _refuse_many(sides, waiting, bounds)
    return tuple(sorted(sides, key=lambda side: -_width(side.bounds)))


def _refuse_many(sides: Sequence[Side], waiting: Sequence[Bounds], bounds: Bounds, last: Proof | None = None) -> None:
    if len(sides) + len(waiting) > MOST_SIDES:
        proof = last or next(proof for side in sides for proof in side.proofs if proof.kept)
        raise _refusal(proof, bounds, f"more than {MOST_SIDES} traces would be needed", _ADVICE)


def unproven(trace: Callable[[Bounds], TracedGraph], bounds: Bounds) -> tuple[Side, ...]:
    """Trace once and take that for the whole program, its conditions unproven: whoever calls it evaluates them."""
    return (Side(bounds, trace(bounds), ()),)


_ADVICE = "make the branch an opaque operator of your own, or pad sizes to a ladder before the call"


def prove(guard: ShapeGuard, bounds: Bounds, sizes: Mapping[str, int]) -> Proof:
    """Show that a condition holds within `bounds`, or find the bounds around the traced `sizes` where it does."""
    try:
        names = names_in(guard.expression)
        if not names:
            proof = Proof(guard.expression, guard.line, EVERY_SIZE, 1)
            if evaluate(guard.expression, {}, NUMBERS):
                return proof
            raise _refusal(proof, bounds, "it never holds", _ADVICE)
        if unknown := [name for name in names if name not in bounds]:
            raise UnknownExpression(unknown[0])
        return _prove_one(guard, names[0], bounds, sizes) if len(names) == 1 else _prove_many(guard, names, bounds)
    except UnknownExpression as error:
        proof = Proof(guard.expression, guard.line, "none", 0)
        raise _refusal(proof, bounds, f"`{error}` is not understood", _ADVICE) from error


def _prove_one(guard: ShapeGuard, name: str, bounds: Bounds, sizes: Mapping[str, int]) -> Proof:
    low, high = bounds[name].low, bounds[name].high
    holds = certain(guard.expression, {name: torch.arange(low, high + 1)}, high + 1 - low)
    proof = Proof(guard.expression, guard.line, EVERY_SIZE, high + 1 - low)
    if bool(holds.all()):
        return proof
    edges = (torch.nonzero(holds[1:] != holds[:-1]).flatten() + low + 1).tolist()
    if len(edges) >= MOST_SIDES:
        raise _refusal(proof, bounds, f"its truth changes {len(edges)} times there", _ADVICE)
    size = sizes[name]
    if not bool(holds[size - low]) and bool(truth(guard.expression, {name: torch.tensor([size])}, 1)):
        raise _Doubtful(proof, {**bounds, name: Range(size, size)})
    if not bool(holds[size - low]):
        raise _refusal(proof, bounds, f"it does not hold at the traced size `{size}` either", _ADVICE)
    first = max((edge for edge in edges if edge <= size), default=low)
    last = min((edge - 1 for edge in edges if edge > size), default=high)
    return replace(proof, kept={name: Range(first, last)})


def _prove_many(guard: ShapeGuard, names: Sequence[str], bounds: Bounds) -> Proof:
    if holds_by_intervals(guard.expression, {name: (bounds[name].low, bounds[name].high) for name in names}):
        return Proof(guard.expression, guard.line, INTERVALS, 0)
    counts = [bounds[name].high + 1 - bounds[name].low for name in names]
    total = int(torch.tensor(counts, dtype=torch.float64).prod())
    if total <= _MOST_PAIRS:
        axes = torch.meshgrid(*(torch.arange(bounds[n].low, bounds[n].high + 1) for n in names), indexing="ij")
        values, method = {name: axis.flatten() for name, axis in zip(names, axes, strict=True)}, EVERY_PAIR
    else:
        values, method = _sample(names, bounds), SAMPLE
    count = len(next(iter(values.values())))
    holds = certain(guard.expression, values, count)
    proof = Proof(guard.expression, guard.line, method, count)
    if bool(holds.all()):
        return proof
    where = int(torch.nonzero(~holds)[0])
    failing = ", ".join(f"{name}={int(values[name][where])}" for name in names)
    raise _refusal(
        proof, bounds, f"it does not hold at {failing}",
        "give dimensions that always agree one name, or make the line an opaque operator of your own",
    )  # fmt: skip


def _sample(names: Sequence[str], bounds: Bounds) -> dict[str, Any]:
    """Draw sizes, the same in every process: ends and powers of two of each name with random ones of the others."""
    source = torch.Generator().manual_seed(0)
    values = {
        name: torch.randint(bounds[name].low, bounds[name].high + 1, (_SAMPLE,), generator=source) for name in names
    }
    for index, name in enumerate(names):
        low, high = bounds[name].low, bounds[name].high
        special = [low, low + 1, high - 1, high, *(1 << power for power in range(20))]
        kept = torch.tensor([size for size in dict.fromkeys(special) if low <= size <= high])
        part = slice(index * _SAMPLE // (2 * len(names)), (index + 1) * _SAMPLE // (2 * len(names)))
        values[name][part] = kept.repeat(_SAMPLE // len(kept) + 1)[: part.stop - part.start]
    equal = slice(_SAMPLE - 4096, _SAMPLE)
    for name in names[1:]:
        values[name][equal] = values[names[0]][equal].clamp(bounds[name].low, bounds[name].high)
    return values


def _intersection(bounds: Bounds, proofs: Sequence[Proof]) -> Bounds:
    kept = dict(bounds)
    for proof in proofs:
        for name, stretch in proof.kept.items():
            kept[name] = Range(max(kept[name].low, stretch.low), min(kept[name].high, stretch.high))
    return kept


def _rest(bounds: Bounds, kept: Bounds) -> list[Bounds]:
    """Cut what `kept` leaves of `bounds` into boxes: below and above it, one name after the other."""
    boxes: list[Bounds] = []
    here = dict(bounds)
    for name in bounds:
        low, high, own = here[name].low, here[name].high, kept[name]
        if low < own.low:
            boxes.append({**here, name: Range(low, own.low - 1)})
        if own.high < high:
            boxes.append({**here, name: Range(own.high + 1, high)})
        here[name] = own
    return boxes


def _singles(bounds: Bounds) -> list[Bounds]:
    boxes: list[Bounds] = [{}]
    for name, bound in bounds.items():
        boxes = [{**box, name: Range(n, n)} for box in boxes for n in range(bound.high, bound.low - 1, -1)]
    return boxes


def _width(bounds: Bounds) -> int:
    width = 1
    for bound in bounds.values():
        width *= bound.high + 1 - bound.low
    return width


def _unserved(error: TraceError, bounds: Bounds, served: Bounds) -> GuardError:
    """Say that the model itself fails on a side: what is right there is to serve the other sizes alone."""
    low = next((name for name, bound in served.items() if bound.high < bounds[name].low), "")
    hint = f"give `{low}` the largest size {served[low].high}" if low else "leave these sizes out of the ranges"
    return GuardError(
        f"the model does not trace at sizes `{_text(bounds)}`: {error.message}",
        hint=f"{hint}, or change the line so that every size is possible",
        facts={**error.facts, "bounds": _text(bounds)},
    )


def _text(bounds: Bounds) -> str:
    return ", ".join(f"{name} {bound}" for name, bound in bounds.items())


def _refusal(proof: Proof, bounds: Bounds, reason: str, hint: str) -> GuardError:
    within = _text(bounds)
    place = f" (at {proof.line})" if proof.line else ""
    return GuardError(
        f"the graph is right only where `{proof.expression}`{place}, which not every size of `{within}` is: {reason}",
        hint=hint,
        facts={"expression": proof.expression, "line": proof.line, "bounds": within},
    )
