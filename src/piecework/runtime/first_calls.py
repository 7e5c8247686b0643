"""The first call of each size, which goes through a run whose bodies are watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from piecework.errors import ContractError
from piecework.seam.contract_errors import at_sizes
from piecework.seam.promises import is_recording

Run = Callable[..., Any]
_MOST_SIZES = 1 << 16  # pairs of sizes may be many: then they are met anew


class EverySize:
    """All sizes, as met ones: what runs a first call asks for no other."""

    def __contains__(self, sizes: object) -> bool:
        return True


class FirstCalls:
    """What a run does with a size that is not among those in `met`: `make` gives the run that watches its bodies.

    A size counts as met once a call of it went through. `names` are those of the sizes, `positions` theirs among a
    run's parameters.
    """

    def __init__(self, make: Callable[[], Run], names: Sequence[str], positions: Sequence[int]) -> None:
        self.met: set[Any] = set()
        self._make = make
        self._made: Run | None = None
        self._names = tuple(names)
        self._positions = tuple(positions)

    def __call__(self, *values: Any) -> Any:
        """Run with watched bodies, and remember the size; a ContractError names it."""
        sizes = [values[position] for position in self._positions]
        try:
            result = self.run()(*values)
        except ContractError as error:
            raise at_sizes(error, dict(zip(self._names, sizes, strict=True))) from None
        if is_recording():
            return result  # what bodies wrote could not be looked at
        if len(self.met) >= _MOST_SIZES:
            self.met.clear()
        self.met.add(sizes[0] if len(sizes) == 1 else tuple(sizes))
        return result

    def run(self) -> Run:
        """Return the run that watches its bodies."""
        if self._made is None:
            self._made = self._make()
        return self._made
