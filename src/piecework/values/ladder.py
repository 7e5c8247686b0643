"""The sizes that are captured, and which token counts each of them serves; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piecework.errors import OptionError
from piecework.values.shapes import Range


@dataclass(frozen=True)
class Rung:
    """One captured size: every count in `serves` is padded up to `size`."""

    size: int
    serves: Range

    @property
    def largest_waste(self) -> float:
        """The share of rows that are padding at the least favourable count."""
        return (self.size - self.serves.low) / self.size

    @property
    def mean_waste(self) -> float:
        """The share of rows that are padding, over all counts that the size serves."""
        return (self.serves.high - self.serves.low) / 2 / self.size


def step_at(size: int) -> int:
    """Return how far the next size lies: a sixteenth of the power of two below, so that waste stays under 12 %."""
    return size if size < 4 else 4 if size < 8 else max(8, (1 << (size.bit_length() - 1)) // 16)


def ladder(maximum: int, sizes: Iterable[int] = ()) -> tuple[Rung, ...]:
    """Return the rungs up to `maximum`, which is always one of them; `sizes`, where given, are the others."""
    if maximum < 1:
        raise OptionError(f"largest captured size `{maximum}` is no size", hint="give a whole number from 1 up")
    chosen = set(sizes)
    for size in chosen:
        if not 1 <= size <= maximum:
            raise OptionError(
                f"captured size `{size}` lies outside [1, {maximum}]",
                hint="raise the maximum, or leave the size out",
                facts={"size": size, "maximum": maximum},
            )
    if not chosen:
        size = 1
        while size < maximum:
            chosen.add(size)
            size += step_at(size)
    ordered = sorted({*chosen, maximum})
    return tuple(Rung(size, Range(low + 1, size)) for low, size in zip([0, *ordered], ordered, strict=False))


def covering(rungs: Sequence[Rung], largest: int) -> list[int]:
    """Return for every count up to `largest` the size that serves it, 0 where none does; a count of 0 has none."""
    table = [0] * (largest + 1)
    for rung in rungs:
        high = min(rung.serves.high, largest)
        table[rung.serves.low : high + 1] = [rung.size] * max(0, high - rung.serves.low + 1)
    return table


def uncovered(rungs: Sequence[Rung], largest: int) -> tuple[Range, ...]:
    """Return the token counts up to `largest` that no size serves."""
    table = covering(rungs, largest)
    gaps: list[Range] = []
    start = 0
    for count in range(1, largest + 2):
        served = count > largest or table[count] != 0
        if not served and not start:
            start = count
        elif served and start:
            gaps.append(Range(start, count - 1))
            start = 0
    return tuple(gaps)
