"""A captured program: pick a size, copy the inputs, replay its segments, check the addresses, hand out the result."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from piecework.capture_events import CaptureFailed, Moved, Refreshed, Released, Replayed, Uncovered
from piecework.errors import CaptureError
from piecework.events import ignore
from piecework.ops.count import COUNT
from piecework.runtime.buffers import StaticInputs
from piecework.runtime.captured import Borrowed, CapturedSize, Parts
from piecework.runtime.idle import capture_within
from piecework.runtime.misfit import refuse_call
from piecework.runtime.permission import capturing, check_permission
from piecework.runtime.signature import compile_check
from piecework.values.coverage import Coverage, coverage
from piecework.values.ladder import covering


class CapturedProgram:
    """A program that replays captured sizes, and runs as it is where no size serves.

    It is called like the program it was made from; calls of several threads take turns. `counts` holds how many calls
    each phase served, and how, by (phase, outcome). Results are the caller's own, or `Borrowed`, as the plan says.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.plan = parts.plan
        self.generation = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sizes: dict[tuple[str, int], CapturedSize] = {}
        self.refused: dict[tuple[str, int], str] = {}
        self._lock = threading.RLock()
        self._phases = {phase.phase: phase for phase in parts.plan.phases}
        self._tables = {name: covering(phase.rungs, parts.largest) for name, phase in self._phases.items()}
        passed = parts.checked.passed
        self._symbols = [passed.index(name) for name in parts.checked.symbols]
        self._tensors = [passed.index(plan.name) for plan in parts.inputs.plans]
        self._fixed = [(passed.index(name), name, tensor) for name, tensor in parts.fixed.items()]
        entries = [partial(self._serve, index) for index in range(len(parts.maker.runs()))]
        self._call, self.source = compile_check(parts.leaves, parts.checked, entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Raises InputError or ShapeOutOfRange where the arguments do not fit, and CaptureError where memory that graphs
        read has moved: then no result is handed out, and `refresh()` mends it.
        """
        try:
            return self._call(*args, **kwargs)
        except TypeError:
            refuse_call(self._call, args, kwargs)
            raise

    def _serve(self, index: int, *passed: Any) -> Any:
        if self._parts.device.is_capturing():
            return self._run(index)(*passed)  # inside another capture the program is a part of that one's graph
        count = max([passed[position] for position in self._symbols], default=1)
        phase = self._parts.phase_of()
        with self._lock:
            captured, reason = self._choose(phase, count)
            if captured is None:
                self._tell_uncovered(phase, count, reason)
                return self._run(index)(*passed)
            return self._replay(captured, count, passed, reason)

    def _run(self, index: int) -> Callable[..., Any]:
        # Asked for each time: a program that was refreshed runs on what it is bound to now.
        return self._parts.maker.runs()[index]

    def _choose(self, phase: str, count: int) -> tuple[CapturedSize | None, str]:
        table = self._tables.get(phase)
        if table is None:
            return None, f"{phase} is not captured"
        size = table[count]
        if not size:
            return None, f"no captured size serves {count} tokens"
        captured = self.sizes.get((phase, size))
        if captured is not None:
            return captured, "exact" if size == count else "padded"
        if (phase, size) in self.refused:
            return None, self.refused[phase, size]
        if self.plan.when == "first_use" and not capturing.reason:
            return self._capture_now(phase, size), self.refused.get((phase, size), "captured on first use")
        return None, f"size {size} is not captured yet"

    def _capture_now(self, phase: str, size: int) -> CapturedSize | None:
        try:
            self.capture(phase, size)
        except CaptureError as error:
            self.note_failure(phase, size, error)
        return self.sizes.get((phase, size))

    def note_failure(self, phase: str, size: int, error: CaptureError) -> None:
        """Leave a size to the program, because it could not be captured."""
        self.refused[phase, size] = error.message
        self._parts.observer(CaptureFailed(phase=phase, size=size, reason=error.message))

    def _replay(self, captured: CapturedSize, count: int, passed: Sequence[Any], reason: str) -> Any:
        parts = self._parts
        for position, name, tensor in self._fixed:
            if passed[position].data_ptr() != tensor.data_ptr():
                raise self._moved((name,))
        parts.device.before_step()
        parts.inputs.load(captured.size, count, [passed[position] for position in self._tensors])
        if captured.step is not None:
            step = parts.current_step()
            if step is not None:
                captured.step.load(step, parts.device.copy_together)
        self.generation += 1
        token = COUNT.set(count)
        try:
            for segment in captured.segments:
                segment()
        finally:
            COUNT.reset(token)
        # The device works on the step while the host looks at the addresses: the check stands in nobody's way.
        self._check_addresses()
        self.counts[captured.phase, captured.form] += 1
        if parts.observer is not ignore:
            parts.observer(
                Replayed(phase=captured.phase, form=captured.form, size=captured.size, num_tokens=count, reason=reason)
            )
        is_owned = self.plan.results == "copied"
        result = captured.build(*[output.take(passed, captured.size, is_owned) for output in captured.outputs])
        return result if is_owned else Borrowed(result, self)

    def _check_addresses(self) -> None:
        if self.plan.checks_addresses and self._parts.table.is_moved() and (names := self.verify_addresses()):
            raise self._moved(names)

    def _moved(self, names: tuple[str, ...]) -> CaptureError:
        self._parts.observer(Moved(names=names))
        listed = ", ".join(f"`{name}`" for name in names[:8]) + (" …" if len(names) > 8 else "")
        return CaptureError(
            f"graphs read memory that has moved since they were captured: {listed}",
            hint="call refresh(): it copies in place where shapes allow, and captures anew where they do not",
            facts={"moved": list(names)},
        )

    def _tell_uncovered(self, phase: str, count: int, reason: str) -> None:
        self.counts[phase, "uncovered"] += 1
        self._parts.observer(Uncovered(phase=phase, num_tokens=count, reason=reason))

    # ------------------------------------------------------------------------------------------------- capture

    def capture(self, phase: str, size: int) -> None:
        """Capture one size now; raise CaptureError where it fails or is forbidden."""
        check_permission(f"size {size} of {phase}")
        with self._lock:
            self._check_addresses()  # one graph may not read new memory while the others read the old
            made = self._parts.maker.make(self._phases[phase], size)
            if made is None:
                self.refused[phase, size] = f"size {size} does not fit the memory budget"
            else:
                self.sizes[phase, size] = made

    @property
    def inputs(self) -> StaticInputs:
        """The memory that inputs are copied to."""
        return self._parts.inputs

    def explain(self) -> tuple[Coverage, ...]:
        """Return which token counts are served by what, and which by nothing and why; each row prints as a line."""
        return coverage(self.plan, self._parts.largest, self.sizes, self.refused)

    @property
    def pending(self) -> tuple[tuple[str, int], ...]:
        """The sizes of the plan that are neither captured nor refused, largest first."""
        wanted = [(name, rung.size) for name, phase in self._phases.items() for rung in phase.rungs]
        left = [key for key in wanted if key not in self.sizes and key not in self.refused]
        return tuple(sorted(left, key=lambda key: -key[1]))

    def verify_addresses(self) -> tuple[str, ...]:
        """Return the names of externals that are not where they were at capture, each with what befell it."""
        return tuple(f"{external.place.name} ({how})" for external, how in self._parts.table.faults())

    def refresh(self) -> Refreshed:
        """Mend what moved: copy in place where shapes allow, else capture anew; return what was done."""
        with self._lock:
            copied, stuck = self._parts.table.repair(self._parts.maker.find)
            recaptured: tuple[str, ...] = ()
            if stuck:
                self._require_sites(stuck)
                self.recapture()
                recaptured = tuple(f"{phase} {size}" for phase, size in self.sizes)
            elif copied:
                self._parts.maker.rebind()
            done = Refreshed(copied=copied, recaptured=recaptured)
            self._parts.observer(done)
            return done

    def _require_sites(self, names: Sequence[str]) -> None:
        """Refuse a weight of another shape: the pieces were bound to the one that was there."""
        bound = [name for name in names if name in self.bound_names]
        if bound:
            raise CaptureError(
                f"`{bound[0]}` does not fit the memory that the program was bound to, so it cannot be copied there",
                hint="bind the program anew, and capture that one",
                facts={"names": bound},
            )

    @property
    def bound_names(self) -> frozenset[str]:
        """The externals that the program itself was bound to: its weights."""
        return frozenset(self._parts.table.weight_names)

    def release(self) -> None:
        """Give back all graphs and their memory; the program goes on without them until `recapture()`."""
        with self._lock:
            held = self._parts.device.used_bytes()
            for captured in self.sizes.values():
                for graph in captured.graphs:
                    graph.reset()
            self.sizes.clear()
            self.refused.clear()
            self.generation += 1
            self._parts.maker.renew()
            self._parts.device.release()
            self._parts.device.collect()
            self._parts.observer(Released(size_bytes=held))

    def recapture(self) -> None:
        """Capture again every size that was captured, or all of the plan where none is."""
        with self._lock:
            wanted = sorted(self.sizes, key=lambda key: -key[1])
            self.release()
            for phase, size in wanted or self.pending:
                self.capture(phase, size)

    def capture_some(self, budget_ms: float) -> tuple[tuple[str, int], ...]:
        """Capture pending sizes, largest first, until the budget is spent; return what was captured."""
        return capture_within(self, budget_ms)
