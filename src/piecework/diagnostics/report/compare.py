"""Two runs side by side: which times, pieces, artifacts and factors of the key differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from piecework.values.key import differing
from piecework.values.view import Bar, PieceView, View


@dataclass(frozen=True)
class TimePair:
    """The seconds that a span took in each run; a run without it took none."""

    name: str
    first_s: float
    second_s: float

    @property
    def change_s(self) -> float:
        return self.second_s - self.first_s


@dataclass(frozen=True)
class PiecePair:
    """A piece of both runs, or of one: its sites and how its artifacts came to be."""

    digest: str
    first: str
    second: str

    @property
    def state(self) -> str:
        if not self.first or not self.second:
            return "only in the second" if not self.first else "only in the first"
        return "the same" if self.first == self.second else "the same text"


@dataclass(frozen=True)
class Comparison:
    """Two runs, and in what they differ."""

    first: View
    second: View
    times: tuple[TimePair, ...]
    pieces: tuple[PiecePair, ...]
    factors: tuple[str, ...]

    @property
    def largest_change(self) -> TimePair | None:
        """The span, the whole run apart, whose time changed most."""
        return max(self.times, key=lambda pair: abs(pair.change_s), default=None)


def compare(first: View, second: View) -> Comparison:
    """Set two runs side by side, the first as what was before."""
    before, after = _seconds(first.bars), _seconds(second.bars)
    times = [TimePair(name, before.get(name, 0.0), after.get(name, 0.0)) for name in dict.fromkeys([*before, *after])]
    mine, theirs = _pieces(first), _pieces(second)
    pieces = [PiecePair(digest, mine.get(digest, ""), theirs.get(digest, "")) for digest in {**mine, **theirs}]
    pairs = zip(first.programs, second.programs, strict=False)
    factors = [factor for one, other in pairs for factor in differing(one.factors, other.factors)]
    ordered = sorted(times, key=lambda pair: -abs(pair.change_s))
    return Comparison(first, second, tuple(ordered), tuple(pieces), tuple(dict.fromkeys(factors)))


def _seconds(bars: Iterable[Bar]) -> dict[str, float]:
    """Add up the time of each span by name; what was put together for its shortness has none."""
    found: dict[str, float] = {}
    for bar in bars:
        if bar.count == 1:
            found[bar.name] = found.get(bar.name, 0.0) + bar.elapsed_s
    return found


def _pieces(view: View) -> Mapping[str, str]:
    return {piece.digest: _describe(piece) for program in view.programs for piece in program.pieces}


def _describe(piece: PieceView) -> str:
    outcomes = ", ".join(f"{artifact.range} {artifact.outcome}" for artifact in piece.artifacts)
    return f"piece {piece.number}, {len(piece.regions)} sites: {outcomes}"
