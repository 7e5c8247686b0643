"""Which token counts are served by what, and which by nothing; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from piecework.values.ladder import uncovered
from piecework.values.phases import NONE, CapturePlan, PhaseCapture
from piecework.values.shapes import Range


@dataclass(frozen=True)
class Coverage:
    """Token counts of one phase that have the same fate: a captured size serves them, or none does, and why."""

    phase: str
    counts: Range
    form: str
    size: int
    largest_waste: float
    reason: str

    def __str__(self) -> str:
        """Say it in a line."""
        low, high = self.counts.low, self.counts.high
        counts = f"{low}" if low == high else f"{low}-{high}"
        if not self.size:
            return f"{self.phase} {counts}: without graphs: {self.reason}"
        waste = f", {self.largest_waste:.0%} padding at most" if self.largest_waste else ""
        return f"{self.phase} {counts}: {self.form}, size {self.size}{waste}; {self.reason}"


def coverage(
    plan: CapturePlan,
    largest: int,
    captured: Collection[tuple[str, int]] = (),
    refused: Mapping[tuple[str, int], str] | None = None,
) -> tuple[Coverage, ...]:
    """Return the fate of every token count up to `largest` in both phases.

    `captured` are the sizes by phase that are there already, `refused` those that will not be, with the reason.
    """
    rows: list[Coverage] = []
    for phase in (plan.decode, plan.prefill):
        if not phase.is_captured:
            rows.append(Coverage(phase.phase, Range(1, largest), NONE, 0, 0.0, phase.reason or "not captured"))
            continue
        rows += [_rung(phase, index, plan, captured, refused or {}) for index in range(len(phase.rungs))]
        reason = "no captured size serves them"
        rows += [Coverage(phase.phase, gap, NONE, 0, 0.0, reason) for gap in uncovered(phase.rungs, largest)]
    return tuple(rows)


def summarize(plan: CapturePlan, largest: int) -> list[str]:
    """Say in a line for each phase how it is captured, by how many sizes, and what no size serves."""
    lines = []
    for phase in (plan.decode, plan.prefill):
        line = f"{phase.phase}: {phase.capture}, {phase.reason}"
        if phase.is_captured:
            gaps = ", ".join(f"{gap.low}-{gap.high}" for gap in uncovered(phase.rungs, largest))
            line += f"; {len(phase.rungs)} sizes serve up to {phase.sizes[-1]} tokens"
            line += f", and none serves {gaps}" if gaps else ""
        lines.append(line)
    return lines


def _rung(
    phase: PhaseCapture,
    index: int,
    plan: CapturePlan,
    captured: Collection[tuple[str, int]],
    refused: Mapping[tuple[str, int], str],
) -> Coverage:
    rung = phase.rungs[index]
    key = (phase.phase, rung.size)
    if key in refused:
        return Coverage(phase.phase, rung.serves, NONE, 0, 0.0, refused[key])
    state = "captured" if key in captured else f"to be captured ({plan.when.replace('_', ' ')})"
    return Coverage(phase.phase, rung.serves, phase.capture, rung.size, rung.largest_waste, state)
