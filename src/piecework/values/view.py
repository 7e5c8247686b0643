"""What a report or a live page shows of a run: made from its events and its program's record, ready to be drawn.

Events come as plain data, as `Event.as_dict` gives them, so that a run of another process is shown like this one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecework.values.ladder import Rung, ladder, uncovered
from piecework.values.shapes import Range

EventFields = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One span of the waterfall; `count` above 1 stands for so many short ones that were put together."""

    name: str
    depth: int
    start_ns: int
    end_ns: int
    own_ns: int = 0
    count: int = 1
    detail: str = ""

    @property
    def elapsed_s(self) -> float:
        """What it took; of several together, what they cover, not what lies between the first and the last."""
        return (self.own_ns if self.count > 1 else self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True)
class ArtifactView:
    """One artifact: its key, what it is for, whether it was compiled, reused or loaded, and why."""

    key: str
    piece: int
    range: str
    outcome: str
    reason: str
    compiler: str = ""
    size_bytes: int = 0
    elapsed_s: float = 0.0
    kernels: int = 0
    guards: tuple[str, ...] = ()
    verified: str = ""
    fall_back: str = ""
    code: str = ""
    code_lines: int = 0


@dataclass(frozen=True)
class PieceView:
    """One distinct piece: its text, the regions that use it, its artifacts, and how long they took to compile."""

    number: int
    digest: str
    text: str
    regions: tuple[int, ...]
    artifacts: tuple[ArtifactView, ...]

    @property
    def calls(self) -> int:
        return sum(" = " in line for line in self.text.splitlines())

    @property
    def compile_s(self) -> float:
        return sum(artifact.elapsed_s for artifact in self.artifacts if artifact.outcome == "compiled")


@dataclass(frozen=True)
class RegionView:
    """One region in order: a site of a piece, or the calls that it makes."""

    index: int
    kind: str
    piece: int
    label: str


@dataclass(frozen=True)
class GuardView:
    """A condition on sizes: the line that asked for it, and how it was shown to hold."""

    expression: str
    line: str
    proof: str


@dataclass(frozen=True)
class Served:
    """Token counts with one fate: the artifacts' range, and the captured size of each phase; empty where none."""

    counts: Range
    range: str
    captured: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptureView:
    """One captured size: bytes as predicted and as measured."""

    phase: str
    form: str
    size: int
    graphs: int
    predicted_bytes: int
    size_bytes: int
    elapsed_s: float


@dataclass(frozen=True)
class MissView:
    """A start that no stored program served: the reason, and the factors in which the nearest one differs."""

    reason: str
    factors: tuple[str, ...]

    @property
    def cause(self) -> str:
        """The factor that caused it, by name; the reason where no factor is known."""
        return ", ".join(factor.partition(":")[0] for factor in self.factors) or self.reason


@dataclass(frozen=True)
class Verdict:
    """What came of running something beside its text: `held`, `failed` or `untried`, and why."""

    what: str
    outcome: str
    reason: str


def misses_of(events: Sequence[EventFields]) -> tuple[MissView, ...]:
    """Return each miss of a program record, oldest first."""
    return tuple(
        MissView(event["reason"], tuple(event["factors"])) for event in events if event["event"] == "RecordMiss"
    )


def captures_of(events: Sequence[EventFields]) -> tuple[CaptureView, ...]:
    """Return the captured sizes by phase, small ones first; one that was captured again counts as it is now."""
    found = {
        (event["phase"], event["size"]): CaptureView(
            event["phase"], event["form"], event["size"], event["graphs"], event["predicted_bytes"],
            event["size_bytes"], (event["end_ns"] - event["start_ns"]) / 1e9,
        )
        for event in events
        if event["event"] == "Captured"
    }  # fmt: skip
    return tuple(found[key] for key in sorted(found))


def verdicts_of(events: Sequence[EventFields]) -> tuple[Verdict, ...]:
    """Return what was verified, what failed first."""
    found = []
    for event in events:
        where = f"{event.get('piece', '')} {event.get('range', '')}".strip()
        if event["event"] == "Verified":
            found.append(Verdict(where, event["outcome"], event["reason"]))
        elif event["event"] == "VerificationFailed":
            found.append(Verdict(where, "failed", event["reason"]))
        elif event["event"] == "Drift":
            off = f"`{event['output']}` is off by {float(event['error']):.2e}"
            found.append(Verdict(f"step {event['step']}", "drift", off))
    rank = {"failed": 0, "drift": 1, "untried": 2}
    unique = dict.fromkeys(found)
    return tuple(sorted(unique, key=lambda one: rank.get(one.outcome, 3)))


def served_counts(
    ranges: Sequence[Range], captures: Sequence[CaptureView], phases: Sequence[str] = ("decode", "prefill")
) -> tuple[Served, ...]:
    """Return every token count, in stretches with one fate: which range's artifacts run, and which captured size."""
    if not ranges:
        return ()
    largest = ranges[-1].high
    rungs = {phase: _rungs(phase, captures, largest) for phase in phases}
    edges = {cut.low for cut in ranges} | {cut.high + 1 for cut in ranges}
    for own in rungs.values():
        edges |= {rung.serves.low for rung in own} | {rung.serves.high + 1 for rung in own}
    starts = sorted(edge for edge in edges if edge <= largest)
    found = []
    for low, after in zip(starts, [*starts[1:], largest + 1], strict=True):
        cut = next((str(cut) for cut in ranges if low in cut), "")
        captured = {
            phase: next((f"size {rung.size}" for rung in own if low in rung.serves), "") for phase, own in rungs.items()
        }
        found.append(Served(Range(low, after - 1), cut, captured))
    return tuple(found)


def uncaptured(captures: Sequence[CaptureView], phase: str, largest: int) -> tuple[Range, ...]:
    """Return the token counts that no captured size of a phase serves."""
    return uncovered(_rungs(phase, captures, largest), largest)


def _rungs(phase: str, captures: Sequence[CaptureView], largest: int) -> tuple[Rung, ...]:
    sizes = [capture.size for capture in captures if capture.phase == phase and capture.size <= largest]
    return ladder(max(sizes), sizes) if sizes else ()


@dataclass(frozen=True)
class ProgramView:
    """One program: how its graph is cut, its pieces, what serves which size, and what was taken for granted."""

    key: str
    regions: tuple[RegionView, ...]
    pieces: tuple[PieceView, ...]
    ranges: Mapping[str, tuple[str, ...]]
    served: tuple[Served, ...]
    guards: tuple[GuardView, ...]
    facts: tuple[tuple[str, str, str], ...]
    factors: Mapping[str, Any]
    traffic: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class View:
    """A run as it is shown."""

    title: str
    wall_s: float
    ready_s: float
    explained: float
    bars: tuple[Bar, ...]
    about: Mapping[str, str]
    programs: tuple[ProgramView, ...]
    misses: tuple[MissView, ...]
    captures: tuple[CaptureView, ...]
    skipped: tuple[tuple[str, int, str], ...]
    verdicts: tuple[Verdict, ...]
    counters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest_piece(self) -> PieceView | None:
        """The piece whose artifacts took longest to compile in this run; None where nothing was compiled."""
        pieces = [piece for program in self.programs for piece in program.pieces if piece.compile_s > 0]
        return max(pieces, key=lambda piece: piece.compile_s, default=None)

    @property
    def largest(self) -> int:
        """The largest token count that is served."""
        return max((one.counts.high for program in self.programs for one in program.served), default=0)

    def without_size(self, phase: str) -> tuple[Range, ...]:
        """Return the token counts of a phase that no captured size serves."""
        return uncaptured(self.captures, phase, self.largest) if self.largest else ()
