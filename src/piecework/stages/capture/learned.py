"""What runs without graphs have taught so far: it holds for every size that is captured afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from piecework.stages.capture.recorder import Notes
from piecework.stages.capture.results import ResultRule
from piecework.stages.capture.sources import Source
from piecework.stages.capture.state import State
from piecework.values.phases import PhaseCapture


@dataclass(frozen=True, eq=False)
class Observed:
    """What the warm-up run of a full graph showed: the same pieces need none between cuts."""

    source: Source
    size: int
    needed_bytes: int
    notes: Notes


@dataclass
class Learned:
    """What one run teaches for all sizes."""

    rule: ResultRule | None = None
    state: State | None = None
    forms_seen: set[str] = field(default_factory=set)
    lowered: dict[str, PhaseCapture] = field(default_factory=dict)
    graph_count: int = 0
    is_collected: bool = False
    observed: Observed | None = None
