"""Each step runs on the best tier that is ready and verified; what fails is left, and the one below goes on.

Tier 0 is eager, tier 1 the compiled program, tier 2 what is captured of it. `climb` makes the upper ones: a generator
that does a slice of work each time it is asked, between two steps or while there are none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

from torch import Tensor

from piecework.engine.batch import Batch
from piecework.engine.events import TierFailed, TierReady
from piecework.engine.generate import StepFunction
from piecework.engine.options import Progress
from piecework.engine.served import call_step
from piecework.errors import ParallelError
from piecework.events import Observer
from piecework.ops import PagedCache
from piecework.values.difference import relative_error
from piecework.values.tolerance import allowed_error

STEPS_PER_SLICE = 4
MOST_ERROR = 0.1  # of logits beside eager's, however many sites there are
EAGER, COMPILED, CAPTURED = 0, 1, 2
READY = Progress("ready", 1, 1)


class Tiers:
    """The tiers of one model: a step function each, or None where there is none yet."""

    def __init__(self, eager: StepFunction, observer: Observer, *, num_sites: int = 1) -> None:
        self.steps: list[StepFunction | None] = [eager, None, None]
        self.progress = READY
        self.trouble = ""
        self.phase = "prefill"
        self.caches: Mapping[str, PagedCache] = {}
        self.most_pages = 0
        self.used = EAGER
        self.num_steps = 0
        self.steps_by_tier = [0, 0, 0]
        self.tokens_by_tier = [0, 0, 0]
        self._observer = observer
        self._num_sites = num_sites
        self._climb: Iterator[None] | None = None
        self._candidate: StepFunction | None = None
        self._comparisons: list[str] = []

    @property
    def best(self) -> int:
        """The best tier that serves."""
        return max(tier for tier, step in enumerate(self.steps) if step is not None)

    @property
    def is_climbing(self) -> bool:
        """Whether there is work to do between steps."""
        return self._climb is not None

    @property
    def wants_steps(self) -> bool:
        """Whether a candidate waits for steps that it can be compared in."""
        return self._candidate is not None

    def climb(self, work: Iterator[None]) -> None:
        """Take on work that makes upper tiers."""
        self._climb = work

    def run(self, batch: Batch) -> Tensor:
        """Run a batch on the best tier; where that fails, on the next, which wrote over whatever it left in pages.

        Tensors:
            ->  [N, V]  model  valid until the next step
        """
        self.phase = "decode" if batch.is_decode else "prefill"
        self.num_steps += 1
        tried = None if self._candidate is None else self._try(self._candidate, batch)
        while True:
            self.used = self.best
            step = self.steps[self.used]
            assert step is not None
            try:
                logits = call_step(step, batch)
                break
            except ParallelError:  # a step that other ranks did not fail in as well leaves nothing to go on with
                raise
            except Exception as error:  # eager's own failure is raised, all else is a tier that is left
                if self.used == EAGER:
                    raise
                self.fail(self.used, f"{type(error).__name__}: {error}")
        if tried is not None:
            self._comparisons.append(self._difference(tried, logits))
        self.steps_by_tier[self.used] += 1
        self.tokens_by_tier[self.used] += batch.num_tokens
        return logits

    def between(self, *, is_idle: bool) -> None:
        """Do a slice of the work at hand: at every chance while there are no steps, else after every few."""
        if self._climb is None or not (is_idle or self.num_steps % STEPS_PER_SLICE == 0):
            return
        try:
            next(self._climb)
        except StopIteration:
            self._end()
        except ParallelError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, the tiers that are there go on
            self.fail(self.best + 1, f"{type(error).__name__}: {error}")
            self._end()

    def swap_in(self, tier: int, step: StepFunction, detail: str = "") -> None:
        """Serve a tier from the next step on."""
        self.steps[tier] = step
        self._observer(TierReady(tier=tier, detail=detail, num_steps=self.num_steps))

    def fail(self, tier: int, reason: str) -> None:
        """Leave a tier and those above it, and say so."""
        for above in range(max(tier, COMPILED), len(self.steps)):
            self.steps[above] = None
        self.trouble = f"tier {tier}: {reason}"
        self._observer(TierFailed(tier=tier, reason=reason))

    def beside(self, candidate: StepFunction, count: int) -> Generator[None, None, str]:
        """Run a candidate beside the next `count` steps; return what is wrong with it, or an empty string.

        It runs first: what stays in the pages is what the tier that serves wrote. While no step comes none is compared.
        """
        self._comparisons, self._candidate = [], candidate
        try:
            while len(self._comparisons) < count and not any(self._comparisons):
                yield
        finally:
            self._candidate = None
        return next((fault for fault in self._comparisons if fault), "")

    def close(self) -> None:
        """Drop the work at hand, and what it started."""
        if self._climb is not None and hasattr(self._climb, "close"):
            self._climb.close()
        self._end()

    def _end(self) -> None:
        self._climb = None
        self.progress = READY

    def _try(self, candidate: StepFunction, batch: Batch) -> Any:
        try:
            return call_step(candidate, batch).clone()
        except ParallelError:
            raise
        except Exception as error:  # noqa: BLE001  code that a compiler wrote may fail in any way
            return error

    def _difference(self, tried: Any, logits: Tensor) -> str:
        """Compare a candidate's logits: at each site both may err by what the tolerance rule allows for one."""
        if isinstance(tried, Exception):
            return f"it raises `{type(tried).__name__}: {tried}`"
        if not logits.shape[0]:
            return ""
        if tried.shape != logits.shape:
            return f"its logits have shape {list(tried.shape)}, eager's {list(logits.shape)}"
        error = relative_error(tried, logits)
        allowed = min(MOST_ERROR, 2 * self._num_sites * allowed_error(0.0, str(logits.dtype).removeprefix("torch.")))
        return "" if error <= allowed else f"its logits are off by {error:.1e}, allowed are {allowed:.1e}"
