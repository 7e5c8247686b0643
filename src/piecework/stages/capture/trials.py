"""Runs without graphs, before the first capture: what they teach holds for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from piecework.errors import CaptureError
from piecework.ops.count import COUNT
from piecework.ops.step import Step, step_context
from piecework.runtime.buffers import StaticInputs, StaticStep
from piecework.stages.capture.externals import Owners
from piecework.stages.capture.results import (
    ResultRule,
    differing_rows,
    differing_sizes,
    flatten,
    last_row,
    learn_rule,
)
from piecework.stages.capture.sources import Source
from piecework.stages.capture.state import State
from piecework.stages.capture.walk import call_plainly, walk
from piecework.values.phases import FULL, PhaseCapture

Steps = Callable[[str, int], Any]
_STATE = "state"  # how tensors that the model writes are named among its results


class Trials:
    """Runs a source at a size, on inputs of its own, in the step that the caller made for that size."""

    def __init__(self, inputs: StaticInputs, owners: Owners, steps: Steps | None, fixed: Mapping[str, Tensor]) -> None:
        self._inputs = inputs
        self._owners = owners
        self._steps = steps
        self._fixed = dict(fixed)

    def values(self, source: Source, size: int) -> dict[str, Any]:
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
    def stepping(self, phase: PhaseCapture, size: int) -> Iterator[StaticStep | None]:
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

    def learn_rule(self, source: Source, phase: PhaseCapture, state: State) -> ResultRule:
        """Run a small size, the next smaller one, and the small one with another last row; `state` is put back."""
        size = next((size for size in phase.sizes if size > 1 and _serves_below(source, size)), 0)
        if not size or not source.symbols:
            return ResultRule({}, {})
        base = self._result(source, phase, dict.fromkeys(source.symbols, size), size)
        smaller = {}
        for index, symbol in enumerate(source.symbols):
            sizes = {**dict.fromkeys(source.symbols, size), symbol: size - 1}
            smaller[symbol] = self._result(source, phase, sizes, size - 1 if index == 0 else size)
        rule = learn_rule(base, size, smaller)
        if any(rung.serves.low < rung.size for rung in phase.rungs):
            for symbol in source.symbols:
                self._check_rows(source, phase, size, symbol, rule, state)
        return rule

    def _check_rows(
        self, source: Source, phase: PhaseCapture, size: int, symbol: str, rule: ResultRule, state: State
    ) -> None:
        """Refuse to pad where a real row, or what the model writes, depends on a later row or on how many there are."""
        rows = [
            (self._inputs.at(size)[plan.name], dim)
            for plan in self._inputs.plans if not plan.is_fixed
            for dim, follows in plan.dims if follows == symbol
        ]  # fmt: skip
        sizes, kept = dict.fromkeys(source.symbols, size), state.copies()

        def run(sizes: Mapping[str, int], count: int = -1) -> dict[str, Any]:
            state.put_back(kept)
            token = COUNT.set(count)
            try:
                found = self._result(source, phase, sizes, size, largest=size)
            finally:
                COUNT.reset(token)
            return found | {f"{_STATE} {number}": tensor for number, tensor in enumerate(state.copies())}

        before = run(sizes)
        if differing_rows(before, run(sizes), rule, symbol):
            return  # the model is not the same from run to run, so nothing can be told
        last_row(rows, lambda row: row.normal_() if row.is_floating_point() else row.fill_(1))
        if names := differing_rows(before, run(sizes), rule, symbol):
            raise _padding_changes(names[0], "the last one's input")
        # What a step holds is made for one size, so a model that reads one says itself how many rows are real. A body
        # may ask for it, but not inside a graph.
        padded = run(sizes, size - 1 if phase.capture != FULL else -1)
        if self._steps is None and (names := differing_sizes(padded, run({**sizes, symbol: size - 1}), rule, symbol)):
            raise _padding_changes(names[0], "how many there are")
        state.put_back(kept)

    def _result(
        self, source: Source, phase: PhaseCapture, sizes: Mapping[str, int], step_size: int, *, largest: int = 0
    ) -> dict[str, Any]:
        """Run once; on the first rows of the inputs that are there for `largest`, where that is given."""
        values = self._kept_values(source, largest) if largest else self.values(source, max(sizes.values()))
        largest = largest or max(sizes.values())
        for plan in self._inputs.plans:
            for dim, symbol in plan.dims:
                if sizes[symbol] != largest:
                    values[plan.name] = values[plan.name].narrow(dim, 0, sizes[symbol]).contiguous()
        values |= {name: size for name, size in sizes.items() if name in values}
        run = source.run_for(sizes)
        with self.stepping(phase, step_size):
            found = flatten(run, walk(run, values, call_plainly))
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in found.items()}

    def _kept_values(self, source: Source, size: int) -> dict[str, Any]:
        """Return a run's arguments with the inputs as an earlier run left them."""
        kept = {name: tensor.clone() for name, tensor in self._inputs.at(size).items()}
        values = self.values(source, size)
        for name, tensor in self._inputs.at(size).items():
            tensor.copy_(kept[name])
        return values


def _padding_changes(name: str, why: str) -> CaptureError:
    if name.startswith(_STATE):
        what, why = "what the model writes in place", f"it follows {why}"
    else:
        what, why = "real rows", f"the first ones of `{name}` follow {why}"
    return CaptureError(
        f"padding would change {what}: {why}",
        hint="the model mixes tokens outside its opaque operators; leave it uncaptured, or capture every size",
        facts={"names": [name]},
    )


def step_tensors(static: StaticStep | None) -> list[Tensor]:
    """Return the metadata that a full graph reads at addresses of its own."""
    if static is None:
        return []
    step = static.step
    return [step.slots, step.query_starts, step.sequence_lengths, step.page_table]


def attributes_of(model: torch.nn.Module | None) -> dict[str, Any]:
    """Return every attribute of every module: what a forward that writes some would change."""
    if model is None:
        return {}
    return {f"{path}.{name}": value for path, module in model.named_modules() for name, value in vars(module).items()}


def refuse_attribute_writes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise where a forward set an attribute that was there before it ran."""
    changed = [n for n, value in after.items() if n not in before or before[n] is not value]
    # What was not there before is made once, lazily; what was replaced is written at each call, and would be no more.
    written = [name for name in changed if name in before]
    if written:
        raise CaptureError(
            f"forward sets the attribute `{written[0].lstrip('.')}`, which a replay would not do",
            hint="return the value instead",
            facts={"attributes": written},
        )


def _serves_below(source: Source, size: int) -> bool:
    """Tell whether the source serves the next smaller size, symbol by symbol: a program may begin above 1."""
    try:
        for symbol in source.symbols:
            source.run_for({**dict.fromkeys(source.symbols, size), symbol: size - 1})
    except CaptureError:
        return False
    return True
