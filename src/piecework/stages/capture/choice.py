"""What a size is captured of: the program as it is bound now, or the whole forward compiled for that very size."""

from __future__ import annotations

from collections.abc import Callable

from piecework.errors import CaptureError, OptionError
from piecework.stages.capture.sources import Source
from piecework.values.phases import DECODE, CapturePlan, PhaseCapture


class Choice:
    """Chooses the source of each size; what is compiled for one size is compiled once."""

    def __init__(self, source: Source, plan: CapturePlan, whole: Callable[[int], Source] | None) -> None:
        self._maximum = plan.whole_forward.maximum
        if self._maximum and whole is None:
            raise OptionError(
                "the whole forward is to be compiled, and nothing was given that compiles it",
                hint="capture what `pw.compile` returned, or give `whole_forward`",
            )
        self._source = source
        self._whole = whole
        self._compiled: dict[int, Source] = {}

    @property
    def base(self) -> Source:
        """The source itself, as it is now."""
        return self._source.now()

    def of(self, phase: PhaseCapture, size: int) -> Source:
        """Return what a size is captured of."""
        source = self.base
        if self._whole is None or phase.phase != DECODE or size > self._maximum:
            return source
        if size not in self._compiled:
            made = self._whole(size)
            # What was compiled for one size takes no size; all else has to be the same.
            if [(leaf.path, leaf.name) for leaf in made.leaves] != [(leaf.path, leaf.name) for leaf in source.leaves]:
                raise CaptureError(
                    f"the whole forward of size {size} takes other arguments than the program",
                    hint="compile it from the same model and example inputs",
                )
            self._compiled[size] = made
        return self._compiled[size]
