"""Capture one size: run it once as it is, learn what has to be known, predict its memory, record its segments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from piecework.capture_events import Captured, CaptureSkipped, Lowered, Unowned
from piecework.errors import CaptureError, PieceworkError
from piecework.events import Observer
from piecework.runtime.buffers import StaticInputs, StaticStep
from piecework.runtime.captured import CapturedSize
from piecework.runtime.owners import AddressTable, Place
from piecework.runtime.permission import check_permission
from piecework.runtime.regions import BoundRun
from piecework.seam.promises import answered_later
from piecework.span_events import sub_phase
from piecework.spans import spanning
from piecework.stages.capture.choice import Choice
from piecework.stages.capture.externals import Census, Owners, record_externals, refuse_written_inputs, written_outside
from piecework.stages.capture.learned import Learned, Observed
from piecework.stages.capture.recorder import Notes, Observing, Recorder
from piecework.stages.capture.results import plan_outputs, rename
from piecework.stages.capture.sources import MODEL, Source
from piecework.stages.capture.state import State, declared_state
from piecework.stages.capture.trials import Steps, Trials, attributes_of, refuse_attribute_writes, step_tensors
from piecework.stages.capture.walk import call_plainly, walk
from piecework.values.device import Device
from piecework.values.phases import (
    BREAKABLE,
    FULL,
    NONE,
    PIECEWISE,
    CapturePlan,
    PhaseCapture,
    check_support,
    lowered_capture,
    unsupported,
)

GRAPH_BYTES = 64 << 10  # what a driver keeps for one graph, until the first capture has measured it


class SizeMaker:
    """Makes captured sizes of one source on one device, now or later."""

    def __init__(
        self, choice: Choice, plan: CapturePlan, device: Device, inputs: StaticInputs,
        table: AddressTable, owners: Owners, steps: Steps | None, fixed: Mapping[str, Tensor], observer: Observer,
    ) -> None:  # fmt: skip
        self._choice = choice
        self._plan = plan
        self._device = device
        self._inputs = inputs
        self._table = table
        self._owners = owners
        self._trials = Trials(inputs, owners, steps, fixed)
        self._fixed = dict(fixed)
        self._observer = observer
        self._learned = Learned()

    def find(self, name: str) -> Place | None:
        """Return where an owner keeps a name now."""
        return self._owners.find(name)

    def runs(self) -> tuple[Callable[..., Any], ...]:
        """Return what runs without graphs, as it is bound now."""
        return self._choice.base.runs

    def rebind(self) -> None:
        """Bind the program to the memory that graphs read, where it was bound to other memory since."""
        self._choice.base.rebind()

    def renew(self) -> None:
        """Forget what was learned: the next capture learns it anew."""
        self._learned = Learned()
        self._table.reset()
        self._inputs.release()

    def make(self, phase: PhaseCapture, size: int) -> CapturedSize | None:
        """Capture one size; None where the budget does not hold it. Raises CaptureError; the device stays usable."""
        start_ns = time.perf_counter_ns()
        with spanning(self._observer) as span:
            found = self._make(phase, size)
        if found is None:
            return None
        made, predicted = found
        self._observer(
            Captured(
                phase=made.phase,
                form=made.form,
                size=size,
                segments=len(made.segments),
                graphs=len(made.graphs),
                predicted_bytes=predicted,
                size_bytes=made.size_bytes,
                start_ns=start_ns,
                span=span,
            )
        )
        return made

    def _make(self, phase: PhaseCapture, size: int) -> tuple[CapturedSize, int] | None:
        """Capture one size; return it and the bytes that were predicted for it."""
        check_permission(f"size {size} of {phase.phase}")
        if self._device.is_capturing():
            raise CaptureError("a size cannot be captured while another graph is", hint="capture before, or afterwards")
        phase = self._learned.lowered.get(phase.phase, phase)
        source = self._choice.of(phase, size)
        run = source.run_for(dict.fromkeys(source.symbols, size))
        if not self._learned.is_collected:
            self._device.collect()  # once: the first graph alone is worth the wait
            self._learned.is_collected = True
        with self._device.session(), torch.no_grad(), self._learn_state(source, phase, size).kept():
            values = self._trials.values(source, size)
            phase = self._learn(source, phase, size, values)
            with answered_later(), self._trials.stepping(phase, size) as static:
                needed, notes = self._observe(source, phase, size, run, values)
                predicted = self._predict(needed, phase, run)
                if not self._fits(phase, size, predicted):
                    return None
                with sub_phase("record"):
                    made = self._record(source, phase, size, run, values, notes, static, predicted)
        return made, predicted

    # ------------------------------------------------------------------------------------------------- learning

    def _observe(
        self, source: Source, phase: PhaseCapture, size: int, run: BoundRun, values: Mapping[str, Any]
    ) -> tuple[int, Notes]:
        """Run once as it is: libraries load, kernels are chosen, and what opaque calls return is noted.

        Returns the bytes that it needed, and the notes.
        """
        before = self._learned.observed
        if phase.capture == PIECEWISE and before is not None and (before.source, before.size) == (source, size):
            return before.needed_bytes, before.notes
        observing = Observing(frozenset(source.operators) if phase.capture == BREAKABLE else frozenset())
        with self._device.measure_peak() as peak, sub_phase("warm-up run"):
            with self._device.watch(observing.around) if phase.capture == BREAKABLE else nullcontext():
                walk(self._watched(source, size) or run, values, observing.region)
        needed = peak()
        self._learned.observed = Observed(source, size, needed, observing.notes) if phase.capture == FULL else None
        return needed, observing.notes

    def _watched(self, source: Source, size: int) -> BoundRun | None:
        """Return the run in which opaque bodies are held to their contract: a captured size runs once as it is."""
        return None if source.watched_for is None else source.watched_for(dict.fromkeys(source.symbols, size))

    def _learn_state(self, source: Source, phase: PhaseCapture, size: int) -> State:
        """Find what the source writes beside its results. A model that was never traced is run once, and undone."""
        state = self._learned.state
        if state is None:
            state = self._learned.state = declared_state(source, self._fixed)
            if source.program is None and source.mode != "stock":
                run, values = source.run_for(dict.fromkeys(source.symbols, size)), self._trials.values(source, size)
                with self._trials.stepping(phase, size) as static:
                    census = Census([*self._inputs.at(size).values(), *step_tensors(static)], state.save)
                    with self._device.watch(census.around):
                        walk(run, values, census.region)
                census.close()
                state.undo()
        return state

    def _learn(self, source: Source, phase: PhaseCapture, size: int, values: Mapping[str, Any]) -> PhaseCapture:
        """Learn once how results follow sizes, and for each form what graphs read from outside.

        Which opaque operators a model calls that was never traced shows here, so the phase may have to be lowered.
        """
        if phase.capture not in self._learned.forms_seen:
            self._learned.forms_seen.add(phase.capture)
            phase = self._survey(source, phase, size, values)
        if self._learned.rule is None:
            self._learned.rule = self._trials.learn_rule(self._choice.base, phase, self._learned.state or State())
        return phase

    def _survey(self, source: Source, phase: PhaseCapture, size: int, values: Mapping[str, Any]) -> PhaseCapture:
        """Record what graphs read from outside; return the phase, lowered where an operator asks for it."""
        run = source.run_for(dict.fromkeys(source.symbols, size))
        buffers = self._inputs.at(size)
        with self._trials.stepping(phase, size) as static:
            attributes = attributes_of(source.model)
            walk(run, values, call_plainly)  # whatever is made lazily is there afterwards
            refuse_attribute_writes(attributes, attributes_of(source.model))
            census = Census([*buffers.values(), *step_tensors(static)])
            if source.mode != "stock":  # what torch.compile made calls kernels that no one can watch
                with self._device.watch(census.around):
                    walk(run, values, census.region)
            census.close()
        refuse_written_inputs(census, {p.path: buffers[p.name] for p in self._inputs.plans if p.name in buffers})
        self._inputs.keep_apart(written_outside(census, self._owners))
        unowned = record_externals(
            self._table, self._owners, source.weights, census if phase.capture != "piecewise" else None
        )
        if unowned:
            self._observer(Unowned(names=unowned))
        return self._settle(source, phase, census)

    def _settle(self, source: Source, phase: PhaseCapture, census: Census) -> PhaseCapture:
        called = {name: support for name, support in source.operators.items() if name in census.called}
        names = unsupported(phase, called) if source.mode in ("none", "stock") else ()
        if not names:
            return phase
        capture = lowered_capture(source.mode)
        if not self._plan.is_lowering_allowed or capture == NONE:
            check_support(phase, called, names)
        self._observer(Lowered(phase=phase.phase, asked=phase.capture, capture=capture, operators=names))
        lowered = replace(phase, capture=capture, reason=f"lowered from {phase.capture}: {', '.join(names)}")
        self._learned.lowered[phase.phase] = lowered
        return lowered

    # ------------------------------------------------------------------------------------------------- recording

    def _predict(self, needed: int, phase: PhaseCapture, run: BoundRun) -> int:
        """Predict the bytes of a size: what exceeds the pool that is there, and the driver's share of each graph."""
        graphs = 1 + (sum(region.is_opaque for region in run.regions) if phase.capture != FULL else 0)
        pool, count = self._device.pool_bytes(), self._learned.graph_count
        each = (self._device.used_bytes() - pool) // count if count else GRAPH_BYTES
        return max(0, needed - pool) + each * graphs

    def _fits(self, phase: PhaseCapture, size: int, predicted: int) -> bool:
        budget = self._plan.memory_budget_bytes
        if budget and self._device.used_bytes() + predicted > budget:
            self._observer(CaptureSkipped(phase=phase.phase, size=size, predicted_bytes=predicted, budget_bytes=budget))
            return False
        return True

    def _record(
        self, source: Source, phase: PhaseCapture, size: int, run: BoundRun, values: Mapping[str, Any], notes: Any,
        static: StaticStep | None, predicted: int,
    ) -> CapturedSize:  # fmt: skip
        owned = {t.untyped_storage().data_ptr() for t in (*self._inputs.at(size).values(), *self._fixed.values())}
        owned |= {t.untyped_storage().data_ptr() for t in source.weights.values()}
        recorder = Recorder(self._device, notes, frozenset(source.operators), frozenset(owned))
        held = self._device.used_bytes()
        try:
            with self._device.holding():
                outputs, build = self._segments(source, phase, size, run, values, recorder)
        except Exception as error:
            self._device.abort()
            for graph in recorder.graphs:
                graph.reset()
            raise self._failure(source, phase, size, run, values, static, recorder.where, error) from error
        held = self._device.used_bytes() - held
        self._learned.graph_count += len(recorder.graphs)
        return CapturedSize(
            phase.phase, phase.capture, size, tuple(recorder.segments), tuple(recorder.graphs), outputs, build, static,
            predicted, held,
        )  # fmt: skip

    def _segments(
        self, source: Source, phase: PhaseCapture, size: int, run: BoundRun, values: Mapping[str, Any],
        recorder: Recorder,
    ) -> Any:  # fmt: skip
        watched = recorder.around if phase.capture == BREAKABLE else recorder.follow
        with self._device.watch(watched) if run.regions[0].kind == MODEL else nullcontext():
            recorder.open()
            call = recorder.inside if phase.capture in (FULL, BREAKABLE) else recorder.between
            found = walk(run, values, call)
            recorder.close()
        # The last results are held by their address alone from here on, so that the next size may use their memory.
        base = self._choice.base  # whose arguments a call passes
        positions = {name: index for index, name in enumerate(base.checked.passed)}
        rule = self._learned.rule
        assert rule is not None
        if source is not base:
            rule = rename(rule, base.run_for(dict.fromkeys(base.symbols, size)), run)
        return plan_outputs(run, found, rule, positions, self._device.alias)

    def _failure(
        self, source: Source, phase: PhaseCapture, size: int, run: BoundRun, values: Mapping[str, Any],
        static: StaticStep | None, where: str, error: Exception,
    ) -> CaptureError:  # fmt: skip
        if isinstance(error, CaptureError):
            return error
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        what = error.message if isinstance(error, PieceworkError) else first
        return CaptureError(
            f"capture of size {size} of {phase.phase} (`{phase.capture}`) failed at `{where or 'the start'}`: {what}",
            hint="the program runs without graphs; declare the operator `never` captured, or capture piecewise",
            facts={
                "phase": phase.phase,
                "capture": phase.capture,
                "size": size,
                "where": where,
                "error": type(error).__name__,
            },
        )
