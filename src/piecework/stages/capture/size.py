"""Capture one size: run it once as it is, learn what has to be known, predict its memory, record its segments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from piecework.errors import CaptureError, PieceworkError
from piecework.events import Captured, CaptureSkipped, Lowered, Observer, Unowned
from piecework.ops.step import Step, step_context
from piecework.runtime.buffers import StaticInputs, StaticStep
from piecework.values.device import Device
from piecework.runtime.owners import AddressTable, Place
from piecework.runtime.permission import check_permission
from piecework.runtime.regions import BoundRun
from piecework.runtime.replay import CapturedSize
from piecework.stages.capture.externals import Census, Owners, record_externals, refuse_written_inputs
from piecework.stages.capture.recorder import Observing, Recorder
from piecework.stages.capture.results import ResultRule, differing_rows, flatten, last_row, learn_rule, plan_outputs
from piecework.stages.capture.sources import Source
from piecework.stages.capture.walk import call_plainly, walk
from piecework.values.phases import (
    BREAKABLE,
    FULL,
    NONE,
    CapturePlan,
    PhaseCapture,
    check_support,
    lowered_capture,
    unsupported,
)

Steps = Callable[[str, int], Any]
GRAPH_BYTES = 64 << 10  # what a driver keeps for one graph, until the first capture has measured it


@dataclass
class Learned:
    """What one run teaches for all sizes."""

    rule: ResultRule | None = None
    forms_seen: set[str] = field(default_factory=set)
    lowered: dict[str, PhaseCapture] = field(default_factory=dict)
    graph_count: int = 0
    is_collected: bool = False


class SizeMaker:
    """Makes captured sizes of one source on one device, now or later."""

    def __init__(
        self, source: Callable[[PhaseCapture, int], Source], plan: CapturePlan, device: Device, inputs: StaticInputs,
        table: AddressTable, owners: Owners, steps: Steps | None, fixed: Mapping[str, Tensor], observer: Observer,
    ) -> None:  # fmt: skip
        self._source = source
        self._plan = plan
        self._device = device
        self._inputs = inputs
        self._table = table
        self._owners = owners
        self._steps = steps
        self._fixed = dict(fixed)
        self._observer = observer
        self._learned = Learned()

    def find(self, name: str) -> Place | None:
        """Return where an owner keeps a name now."""
        return self._owners.find(name)

    def renew(self) -> None:
        """Forget what was learned: the next capture learns it anew."""
        self._learned = Learned()
        self._table.reset()
        self._inputs.release()

    def make(self, phase: PhaseCapture, size: int) -> CapturedSize | None:
        """Capture one size; None where the budget does not hold it. Raises CaptureError and leaves the device usable."""
        start_ns = time.perf_counter_ns()
        check_permission(f"size {size} of {phase.phase}")
        if self._device.is_capturing():
            raise CaptureError("a size cannot be captured while another graph is", hint="capture before, or afterwards")
        phase = self._learned.lowered.get(phase.phase, phase)
        source = self._source(phase, size)
        run = source.run_for(dict.fromkeys(source.symbols, size))
        if not self._learned.is_collected:
            self._device.collect()  # once: the first graph alone is worth the wait
            self._learned.is_collected = True
        with self._device.session(), torch.no_grad():
            values = self._values(source, size)
            phase = self._learn(source, phase, size, values)
            with self._stepping(phase, size) as static, self._device.measure_peak() as peak:
                notes = self._observe(source, phase, run, values)
            predicted = self._predict(peak(), phase, run)
            budget = self._plan.memory_budget_bytes
            if budget and self._device.used_bytes() + predicted > budget:
                self._observer(CaptureSkipped(phase=phase.phase, size=size, predicted_bytes=predicted, budget_bytes=budget))
                return None
            made = self._record(source, phase, size, run, values, notes, static, predicted)
        self._observer(
            Captured(
                phase=made.phase, form=made.form, size=size, segments=len(made.segments), graphs=len(made.graphs),
                predicted_bytes=predicted, size_bytes=made.size_bytes, start_ns=start_ns, end_ns=time.perf_counter_ns(),
            )  # fmt: skip
        )
        return made

    # -------------------------------------------------------------------------------------------------- values

    def _values(self, source: Source, size: int) -> dict[str, Any]:
        """Return what a run is called with at a size: static inputs, fixed ones, constants, and sizes."""
        buffers = self._inputs.at(size)
        by_path: dict[str, Any] = {}
        values: dict[str, Any] = dict.fromkeys(source.symbols, size)
        for leaf in source.leaves:
            if leaf.same_as:
                by_path[leaf.path] = by_path[leaf.same_as]
            elif leaf.name in buffers:
                by_path[leaf.path] = buffers[leaf.name]
            else:
                by_path[leaf.path] = self._fixed.get(leaf.name, leaf.value)
            values[leaf.name] = by_path[leaf.path]
        for tensor in buffers.values():
            # Numbers that are valid for indices, and that hide nothing where they are multiplied.
            tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
        return {name: values[name] for name in source.checked.passed}

    @contextmanager
    def _stepping(self, phase: PhaseCapture, size: int) -> Iterator[StaticStep | None]:
        """Enter the step that the phase's graphs are made under; a full graph gets metadata at addresses of its own."""
        given = self._steps(phase.phase, size) if self._steps is not None else None
        static = StaticStep(given) if isinstance(given, Step) and phase.capture == FULL else None
        if static is not None and static.step.sites:
            self._owners.add("sites", static.step.sites)
        context: AbstractContextManager[Any] = nullcontext()
        if isinstance(given, Step):
            context = step_context(static.step if static is not None else given)
        elif given is not None:
            context = given
        with context:
            yield static

    # ------------------------------------------------------------------------------------------------- learning

    def _observe(self, source: Source, phase: PhaseCapture, run: BoundRun, values: Mapping[str, Any]) -> Any:
        """Run once as it is: libraries load, kernels are chosen, and what opaque calls return is noted."""
        observing = Observing(frozenset(source.operators) if phase.capture == BREAKABLE else frozenset())
        with self._device.watch(observing.around) if phase.capture == BREAKABLE else nullcontext():
            walk(run, values, observing.region)
        return observing.notes

    def _learn(self, source: Source, phase: PhaseCapture, size: int, values: Mapping[str, Any]) -> PhaseCapture:
        """Learn once how results follow sizes, and for each form what graphs read from outside.

        Which opaque operators a model calls that was never traced shows here, so the phase may have to be lowered.
        """
        if self._learned.rule is None:
            self._learned.rule = self._learn_rule(source, phase)
        if phase.capture in self._learned.forms_seen:
            return phase
        self._learned.forms_seen.add(phase.capture)
        run = source.run_for(dict.fromkeys(source.symbols, size))
        buffers = self._inputs.at(size)
        with self._stepping(phase, size) as static:
            attributes = _attributes(source.model)
            walk(run, values, call_plainly)  # whatever is made lazily is there afterwards
            _refuse_attribute_writes(attributes, _attributes(source.model))
            census = Census([*buffers.values(), *_step_tensors(static)])
            with self._device.watch(census.around):
                walk(run, values, lambda region, given: region.call(*given))
            census.close()
        refuse_written_inputs(census, buffers)
        unowned = record_externals(self._table, self._owners, source.weights, census if phase.capture != "piecewise" else None)
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

    def _learn_rule(self, source: Source, phase: PhaseCapture) -> ResultRule:
        """Run a small size, the next smaller one, and the small one with another last row."""
        size = next((size for size in phase.sizes if size > 1), 0)
        if not size or not source.symbols:
            return ResultRule({}, {})
        base = self._result(source, phase, dict.fromkeys(source.symbols, size), size)
        smaller = {}
        for index, symbol in enumerate(source.symbols):
            sizes = {**dict.fromkeys(source.symbols, size), symbol: size - 1}
            smaller[symbol] = self._result(source, phase, sizes, size - 1 if index == 0 else size)
        rule = learn_rule(base, size, smaller)
        if any(rung.serves.low < rung.size for rung in phase.rungs):
            self._check_rows(source, phase, size, base, rule)
        return rule

    def _check_rows(self, source: Source, phase: PhaseCapture, size: int, base: Mapping[str, Any], rule: ResultRule) -> None:
        """Refuse to pad where a row's result depends on a later row's input."""
        symbol = source.symbols[0]
        rows = [
            (self._inputs.at(size)[plan.name], dim)
            for plan in self._inputs.plans if not plan.is_fixed
            for dim, follows in plan.dims if follows == symbol
        ]  # fmt: skip
        sizes = dict.fromkeys(source.symbols, size)
        before = self._result(source, phase, sizes, size, is_filled=False)
        again = self._result(source, phase, sizes, size, is_filled=False)
        if differing_rows(before, again, rule, symbol):
            return  # the model is not the same from run to run, so nothing can be told
        last_row(rows, lambda row: row.normal_() if row.is_floating_point() else row.fill_(1))
        changed = differing_rows(before, self._result(source, phase, sizes, size, is_filled=False), rule, symbol)
        if changed:
            raise CaptureError(
                f"padding would change real rows: `{changed[0]}` differs in its first rows when the last one's input changes",
                hint="the model mixes tokens outside its opaque operators; leave it uncaptured",
                facts={"names": list(changed)},
            )

    def _result(
        self, source: Source, phase: PhaseCapture, sizes: Mapping[str, int], step_size: int, *, is_filled: bool = True
    ) -> dict[str, Any]:
        largest = max(sizes.values())
        values = self._values(source, largest) if is_filled else self._kept_values(source, largest)
        for plan in self._inputs.plans:
            for dim, symbol in plan.dims:
                if sizes[symbol] != largest:
                    values[plan.name] = values[plan.name].narrow(dim, 0, sizes[symbol]).contiguous()
        values |= {name: size for name, size in sizes.items() if name in values}
        run = source.run_for(sizes)
        with self._stepping(phase, step_size):
            found = flatten(run, walk(run, values, call_plainly))
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in found.items()}

    def _kept_values(self, source: Source, size: int) -> dict[str, Any]:
        """Return a run's arguments with the inputs as an earlier run left them."""
        kept = {name: tensor.clone() for name, tensor in self._inputs.at(size).items()}
        values = self._values(source, size)
        for name, tensor in self._inputs.at(size).items():
            tensor.copy_(kept[name])
        return values

    # ------------------------------------------------------------------------------------------------- recording

    def _predict(self, needed: int, phase: PhaseCapture, run: BoundRun) -> int:
        """Predict the bytes of a size: what exceeds the pool that is there, and the driver's share of each graph."""
        graphs = 1 + (sum(region.is_opaque for region in run.regions) if phase.capture != FULL else 0)
        pool, count = self._device.pool_bytes(), self._learned.graph_count
        each = (self._device.used_bytes() - pool) // count if count else GRAPH_BYTES
        return max(0, needed - pool) + each * graphs

    def _record(
        self, source: Source, phase: PhaseCapture, size: int, run: BoundRun, values: Mapping[str, Any], notes: Any,
        static: StaticStep | None, predicted: int,
    ) -> CapturedSize:  # fmt: skip
        owned = {t.untyped_storage().data_ptr() for t in (*self._inputs.at(size).values(), *self._fixed.values())}
        owned |= {t.untyped_storage().data_ptr() for t in source.weights.values()}
        recorder = Recorder(self._device, notes, frozenset(source.operators), frozenset(owned))
        held = self._device.used_bytes()
        try:
            context = step_context(static.step) if static is not None else nullcontext()
            with self._device.holding(), context:
                outputs, build = self._segments(source, phase, run, values, recorder)
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

    def _segments(self, source: Source, phase: PhaseCapture, run: BoundRun, values: Mapping[str, Any], recorder: Recorder) -> Any:
        with self._device.watch(recorder.around) if phase.capture == BREAKABLE else nullcontext():
            recorder.open()
            call = recorder.inside if phase.capture in (FULL, BREAKABLE) else recorder.between
            found = walk(run, values, call)
            recorder.close()
        # The last results are held by their address alone from here on, so that the next size may use their memory.
        positions = {name: index for index, name in enumerate(source.checked.passed)}
        assert self._learned.rule is not None
        return plan_outputs(run, found, self._learned.rule, positions, self._device.alias)

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
            facts={"phase": phase.phase, "capture": phase.capture, "size": size, "where": where, "error": type(error).__name__},
        )


def _step_tensors(static: StaticStep | None) -> list[Tensor]:
    if static is None:
        return []
    step = static.step
    return [step.slots, step.query_starts, step.sequence_lengths, step.page_table]


def _attributes(model: torch.nn.Module | None) -> dict[str, Any]:
    """Return every attribute of every module: what a forward that writes some would change."""
    if model is None:
        return {}
    return {f"{path}.{name}": value for path, module in model.named_modules() for name, value in vars(module).items()}


def _refuse_attribute_writes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    changed = [n for n, value in after.items() if n not in before or before[n] is not value]
    # What was not there before is made once, lazily; what was replaced is written at each call, and would be no more.
    written = [name for name in changed if name in before]
    if written:
        raise CaptureError(
            f"forward sets the attribute `{written[0].lstrip('.')}`, which a replay would not do",
            hint="return the value instead",
            facts={"attributes": written},
        )
