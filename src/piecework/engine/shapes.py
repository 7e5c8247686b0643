"""The shapes that steps have, and which of them a start has run; torch-free.

A compiler that works while a server serves tells shapes apart by more than their size: Triton, for one, makes a kernel
of its own for a count of 1 and for one that divides by 16. Shapes that no such rule tells apart are of one kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from piecework.errors import OptionError
from piecework.values.phases import PHASES

_DIVISOR = 16


@dataclass(frozen=True, order=True)
class StepShape:
    """What a step looks like from outside: its phase, tokens, sequences, and the longest of these when it is done."""

    phase: str
    num_tokens: int
    num_sequences: int
    longest: int

    def __post_init__(self) -> None:
        counts = (self.num_tokens, self.num_sequences, self.longest)
        if self.phase not in PHASES or not all(isinstance(count, int) and count > 0 for count in counts):
            raise OptionError(f"`{self.as_dict()}` is no shape of a step", hint="counts are whole numbers from 1 up")
        if self.num_sequences > self.num_tokens:
            raise OptionError(
                f"a step of {self.num_tokens} tokens has no room for {self.num_sequences} sequences",
                hint="each sequence brings one token at least",
            )

    @property
    def kind(self) -> str:
        """What is told apart: the phase, and the class of each count."""
        return f"{self.phase} {count_class(self.num_tokens)} tokens, {count_class(self.num_sequences)} sequences"

    def as_dict(self) -> dict[str, Any]:
        """Return the shape as plain data."""
        return asdict(self)


def count_class(count: int) -> str:
    """Return the class of a count: the powers of two that it lies between, and whether it divides by 16."""
    if count == 1:
        return "1"
    high = 1 << (count - 1).bit_length()
    return f"{high // 2 + 1}-{high}" + (f" (of {_DIVISOR})" if count % _DIVISOR == 0 else "")


class Coverage:
    """Which kinds of shapes were run before the server was ready, and which it met since.

    Written by the engine's thread, read by any.
    """

    def __init__(self) -> None:
        self.warmed: set[str] = set()
        self._met: Counter[str] = Counter()
        self._first: dict[str, StepShape] = {}
        self._warmed_sizes: set[tuple[str, str]] = set()
        self._tiers: dict[tuple[str, str], tuple[int, int]] = {}
        self._is_armed = False

    def arm(self) -> None:
        """From now on shapes are met by serving; those before were the start's own."""
        self._is_armed = True

    def note(self, shape: StepShape) -> bool:
        """Note a step; say whether its kind is met for the first time, and no start had run it."""
        kind = shape.kind
        if not self._is_armed:
            self.warmed.add(kind)
            self._warmed_sizes.add((shape.phase, count_class(shape.num_tokens)))
            return False
        self._met[kind] += 1
        if self._met[kind] > 1 or kind in self.warmed:
            return False
        self._first[kind] = shape
        return True

    def served(self, shape: StepShape, tier: int) -> None:
        """Note which tier ran a step."""
        place = (shape.phase, count_class(shape.num_tokens))
        steps, _ = self._tiers.get(place, (0, 0))
        self._tiers[place] = (steps + 1, tier)

    def rows(self) -> list[dict[str, Any]]:
        """Return each phase and class of sizes that ran: how many steps, by which tier the last, was it the start's."""
        found = sorted(self._tiers.copy().items(), key=lambda each: (each[0][0], _low(each[0][1])))
        return [
            {"phase": place[0], "size": place[1], "steps": steps, "tier": tier, "warmed": place in self._warmed_sizes}
            for place, (steps, tier) in found
        ]

    @property
    def num_met(self) -> int:
        return len(self._met)

    @property
    def num_covered(self) -> int:
        return sum(kind in self.warmed for kind in list(self._met))

    @property
    def ratio(self) -> float:
        """The share of the kinds met that the start had run; 1 while none was met."""
        return self.num_covered / self.num_met if self.num_met else 1.0

    @property
    def uncovered(self) -> Mapping[str, StepShape]:
        """The kinds that the start had not run, each with the shape that brought it up."""
        return dict(self._first)


def _low(text: str) -> int:
    return int(text.split("-")[0].split(" ")[0])


def parse_sweep(text: str) -> tuple[StepShape, ...]:
    """Read `sizes=1,16,64-66`: each size once as a prompt and once as a batch that is decoded."""
    name, _, values = text.partition("=")
    if name.strip() != "sizes" or not values.strip():
        raise OptionError(f"`--sweep {text}` is not understood", hint="write `--sweep sizes=1,16,128` or `sizes=1-8`")
    sizes: list[int] = []
    for part in values.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or not 0 < int(low) <= int(high or low) <= 1 << 20:
            raise OptionError(f"`{part}` in `--sweep {text}` is no size", hint="write sizes as `8`, ranges as `1-8`")
        sizes += range(int(low), int(high or low) + 1)
    return tuple(shape for size in dict.fromkeys(sizes) for shape in shapes_of(size))


def shapes_of(size: int) -> Iterable[StepShape]:
    """Return the two shapes of a size: one prompt of so many tokens, and so many sequences with one token each."""
    yield StepShape("prefill", size, 1, size) if size > 1 else StepShape("decode", 1, 1, 1)
    if size > 1:
        yield StepShape("decode", size, size, 2)
