"""What is captured in each phase, what may be, and what is by default; torch-free.

A step is of one of two phases. `decode`: every sequence has the same number of tokens, one or a few.
`prefill`: any other step, prompts and mixtures. Each phase is captured in one way of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piecework.errors import CaptureError, OptionError
from piecework.values.ladder import Rung

DECODE, PREFILL = "decode", "prefill"
PHASES = (DECODE, PREFILL)
NONE, FULL, PIECEWISE, BREAKABLE = "none", "full", "piecewise", "breakable"
CAPTURES = (NONE, FULL, PIECEWISE, BREAKABLE)

RUNS = ""
_NO_CUTS = "the model is one piece: nothing stands between two graphs"
TABLE: Mapping[tuple[str, str], str] = {
    ("none", NONE): RUNS,
    ("none", FULL): RUNS,
    ("none", PIECEWISE): "the model was not cut: without a trace there are no pieces",
    ("none", BREAKABLE): RUNS,
    ("stock", NONE): RUNS,
    ("stock", FULL): RUNS,
    ("stock", PIECEWISE): "torch.compile decides where its graph breaks: there are no pieces",
    ("stock", BREAKABLE): "an opaque call inside torch.compile's code is not seen while capturing",
    ("trace_once", NONE): RUNS,
    ("trace_once", FULL): RUNS,
    ("trace_once", PIECEWISE): _NO_CUTS,
    ("trace_once", BREAKABLE): "an opaque call inside a compiled piece is not seen while capturing",
    ("piecewise", NONE): RUNS,
    ("piecewise", FULL): RUNS,
    ("piecewise", PIECEWISE): RUNS,
    ("piecewise", BREAKABLE): "the cuts are known already",
}
"""Mode × capture: empty where it runs, else why it is refused."""

_INSTEAD = {"none": BREAKABLE, "stock": FULL, "trace_once": FULL, "piecewise": PIECEWISE}


@dataclass(frozen=True)
class PhaseCapture:
    """How one phase is captured; `reason` says who decided."""

    phase: str
    capture: str = NONE
    rungs: tuple[Rung, ...] = ()
    tokens_per_sequence: int = 1
    compiler: str = ""
    reason: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(rung.size for rung in self.rungs)

    @property
    def is_captured(self) -> bool:
        return self.capture != NONE


@dataclass(frozen=True)
class WholeForward:
    """The whole forward compiled once more for each decode size up to `maximum`; 0 turns it off."""

    maximum: int = 0
    compiler_mode: str = "max-autotune-no-cudagraphs"


@dataclass(frozen=True)
class CapturePlan:
    """What is captured, phase by phase, in plain values: nothing is left to decide."""

    decode: PhaseCapture = field(default_factory=lambda: PhaseCapture(DECODE))
    prefill: PhaseCapture = field(default_factory=lambda: PhaseCapture(PREFILL))
    whole_forward: WholeForward = field(default_factory=WholeForward)
    is_lowering_allowed: bool = False
    checks_addresses: bool = True
    memory_budget_bytes: int = 0
    when: str = "startup"
    results: str = "copied"

    @property
    def phases(self) -> tuple[PhaseCapture, ...]:
        """The phases that are captured."""
        return tuple(phase for phase in (self.decode, self.prefill) if phase.is_captured)


def default_capture(platform: str, mode: str, rule: str = "") -> dict[str, tuple[str, str]]:
    """Return for each phase what is captured where nothing is asked for, and why.

    A `rule` of the optimisation level may name one capture for both phases.
    """
    if platform != "cuda":
        return dict.fromkeys(PHASES, (NONE, f"on `{platform}` nothing is captured: there are no CUDA graphs"))
    if rule in CAPTURES:
        legal = rule if not TABLE[mode, rule] else NONE
        return dict.fromkeys(PHASES, (legal, TABLE[mode, rule] or "the default of the optimisation level"))
    prefill = {"piecewise": PIECEWISE, "none": BREAKABLE}.get(mode, NONE)
    why = TABLE[mode, PIECEWISE] if prefill == NONE else "the default"
    return {
        DECODE: (FULL, f"the default on cuda in mode `{mode}`"),
        PREFILL: (prefill, f"the default on cuda in mode `{mode}`" if prefill != NONE else f"mode `{mode}`: {why}"),
    }


def check_legal(mode: str, capture: str, phase: str) -> None:
    """Raise OptionError where a mode has nothing that could be captured this way."""
    if (mode, capture) not in TABLE:
        raise OptionError(
            f"capture `{capture}` in mode `{mode}` is unknown", hint=f"captures are {', '.join(CAPTURES)}"
        )
    why = TABLE[mode, capture]
    if why:
        raise OptionError(
            f"{phase} cannot be captured `{capture}` in mode `{mode}`: {why}",
            hint=f"use `{_INSTEAD[mode]}`, or another mode",
            facts={"phase": phase, "mode": mode, "capture": capture},
        )


_LEVELS = ("never", "one_token_decode", "uniform_decode", "always")


def needed_support(phase: PhaseCapture) -> str:
    """Return the least support that an opaque op needs to stand inside the phase's graphs."""
    if phase.capture != FULL:
        return "never"
    if phase.phase == PREFILL:
        return "always"
    return "one_token_decode" if phase.tokens_per_sequence == 1 else "uniform_decode"


def unsupported(phase: PhaseCapture, support: Mapping[str, str]) -> tuple[str, ...]:
    """Return the opaque ops whose declared support the phase's capture exceeds."""
    needed = _LEVELS.index(needed_support(phase))
    return tuple(name for name, level in support.items() if _LEVELS.index(level) < needed)


def lowered_capture(mode: str) -> str:
    """Return what `full` is lowered to where an opaque op may not stand inside a graph."""
    return next((capture for capture in (PIECEWISE, BREAKABLE) if TABLE[mode, capture] == RUNS), NONE)


def check_support(phase: PhaseCapture, support: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise CaptureError that names the opaque ops which may not be captured this way."""
    if names:
        listed = ", ".join(f"`{name}` ({support[name]})" for name in names)
        raise CaptureError(
            f"{phase.phase} cannot be captured `full`: {listed} may not stand inside its graph, which needs "
            f"`{needed_support(phase)}`",
            hint='declare what the body supports, split_op(name, capture="…"); capture piecewise; or allow lowering',
            facts={"phase": phase.phase, "operators": list(names), "needed": needed_support(phase)},
        )
