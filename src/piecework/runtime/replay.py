"""A captured program: pick a size, copy the inputs, replay its segments, check the addresses, hand out the result."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from piecework.capture_events import CaptureFailed, Moved, Refreshed, Released, Replayed, Uncovered
from piecework.errors import CaptureError
from piecework.events import Observer, ignore
from piecework.ops.count import COUNT
from piecework.ops.step import Step
from piecework.runtime.buffers import StaticInputs, StaticStep
from piecework.runtime.idle import capture_within
from piecework.runtime.owners import AddressTable, Place
from piecework.runtime.permission import capturing, check_permission
from piecework.runtime.segments import Output, Segment
from piecework.runtime.signature import compile_check
from piecework.values.device import Device, Graph
from piecework.values.ladder import covering
from piecework.values.phases import CapturePlan, PhaseCapture

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class CapturedSize:
    """One padded size of one phase: its segments in order, and where its result lies."""

    phase: str
    form: str
    size: int
    segments: tuple[Segment, ...]
    graphs: tuple[Graph, ...]
    outputs: tuple[Output, ...]
    build: Callable[..., Any]
    step: StaticStep | None
    predicted_bytes: int
    size_bytes: int


class Borrowed(Generic[Value]):
    """A result that lies in the graphs' own memory: it is valid until the next step, and says so afterwards."""

    __slots__ = ("_generation", "_program", "_value")

    def __init__(self, value: Value, program: CapturedProgram) -> None:
        self._value = value
        self._program = program
        self._generation = program.generation

    @property
    def value(self) -> Value:
        """The result; raises CaptureError once a later step has begun."""
        if self._generation != self._program.generation:
            raise CaptureError(
                "a borrowed result was read after the next step had begun: its memory holds another step's numbers",
                hint='read it before the next call, clone it, or capture with `results="copied"`',
            )
        return self._value


class Maker(Protocol):
    """What capture hands to a captured program: how one more size is made, and what it was told."""

    def make(self, phase: PhaseCapture, size: int) -> CapturedSize | None: ...

    def find(self, name: str) -> Place | None: ...

    def renew(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Parts:
    """All that a captured program is put together from."""

    plan: CapturePlan
    device: Device
    inputs: StaticInputs
    table: AddressTable
    maker: Maker
    observer: Observer
    leaves: Sequence[Any]
    checked: Any
    runs: tuple[Callable[..., Any], ...]
    largest: int
    phase_of: Callable[[], str]
    current_step: Callable[[], Step | None]
    fixed: Mapping[str, Tensor]


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
        entries = [partial(self._serve, run) for run in parts.runs]
        self._call, self.source = compile_check(parts.leaves, parts.checked, entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Raises InputError or ShapeOutOfRange where the arguments do not fit, and CaptureError where memory that graphs
        read has moved: then no result is handed out, and `refresh()` mends it.
        """
        return self._call(*args, **kwargs)

    def _serve(self, run: Callable[..., Any], *passed: Any) -> Any:
        if self._parts.device.is_capturing():
            return run(*passed)  # inside another capture the program is a part of that one's graph
        count = max([passed[position] for position in self._symbols], default=1)
        phase = self._parts.phase_of()
        with self._lock:
            captured, reason = self._choose(phase, count)
            if captured is None:
                self._tell_uncovered(phase, count, reason)
                return run(*passed)
            return self._replay(captured, count, passed, reason)

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
        if self.plan.checks_addresses and parts.table.is_moved():
            raise self._moved(tuple(f"{e.place.name} ({how})" for e, how in parts.table.faults()))
        self.counts[captured.phase, captured.form] += 1
        if parts.observer is not ignore:
            parts.observer(
                Replayed(phase=captured.phase, form=captured.form, size=captured.size, num_tokens=count, reason=reason)
            )
        is_owned = self.plan.results == "copied"
        result = captured.build(*[output.take(passed, captured.size, is_owned) for output in captured.outputs])
        return result if is_owned else Borrowed(result, self)

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
            made = self._parts.maker.make(self._phases[phase], size)
            if made is None:
                self.refused[phase, size] = f"size {size} does not fit the memory budget"
            else:
                self.sizes[phase, size] = made

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
