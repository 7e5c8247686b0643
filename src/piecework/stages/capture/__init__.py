"""Capture: a bound program, or a model that was never traced, becomes segments that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from piecework.capture_events import Lowered
from piecework.errors import CaptureError, OptionError
from piecework.events import Observer, Ready, ignore
from piecework.events import phase as phase_of_start
from piecework.ops.step import Step, running_step
from piecework.runtime.buffers import StaticInputs, plan_inputs
from piecework.runtime.captured import Parts
from piecework.runtime.owners import AddressTable
from piecework.runtime.replay import CapturedProgram
from piecework.stages.capture.choice import Choice
from piecework.stages.capture.externals import Owners
from piecework.stages.capture.size import SizeMaker
from piecework.stages.capture.sources import Source, model_source, program_source
from piecework.stages.capture.trials import Steps
from piecework.values.device import Device
from piecework.values.phases import (
    DECODE,
    FULL,
    PIECEWISE,
    PREFILL,
    CapturePlan,
    PhaseCapture,
    check_legal,
    check_support,
    lowered_capture,
    unsupported,
)

__all__ = ["capture", "model_source", "program_source"]


def capture(
    source: Source,
    plan: CapturePlan,
    device: Device,
    *,
    owners: Mapping[str, Any] | None = None,
    steps: Steps | None = None,
    phase_of: Callable[[], str] | None = None,
    fixed: Mapping[str, Tensor] | None = None,
    whole_forward: Callable[[int], Source] | None = None,
    observer: Observer = ignore,
) -> CapturedProgram:
    """Capture a source as the plan says, and return the program that replays it.

    `owners` hold the tensors that graphs read, by name: the model under "" gives its weights their own names. `steps`
    makes the worst-case step of a phase and a size (a `Step`, or a context manager for metadata of the caller's own).
    `phase_of` says which phase a call is of; by default the running step tells. `fixed` are inputs that are passed at
    the same address in every call, such as caches. `whole_forward` compiles decode sizes up to the plan's bound anew.

    Raises CaptureError, and OptionError where the plan asks for what the source cannot do.
    """
    plan = _settle(source, plan, observer)
    if plan.decode.tokens_per_sequence > 1 and phase_of is None:
        raise OptionError(
            "decode steps of several tokens a sequence cannot be told by their counts", hint="give `phase_of`"
        )
    table, given = AddressTable(), fixed or {}
    names = {leaf.path: leaf.name for leaf in source.leaves}
    if unknown := [path for path in given if path not in names]:
        raise OptionError(f"`fixed` names `{unknown[0]}`, which is no input", hint=f"inputs are {', '.join(names)}")
    by_name = {names[path]: tensor for path, tensor in given.items()}
    plans = plan_inputs(_fix(source, by_name), source.symbols)
    largest = max((size for phase in plan.phases for size in phase.sizes), default=1)
    inputs = StaticInputs(plans, largest, source.device, device.copy_together)
    maker = SizeMaker(
        Choice(source, plan, whole_forward), plan, device, inputs, table, _owners(source, owners), steps, by_name,
        observer,
    )  # fmt: skip
    program = CapturedProgram(
        Parts(
            plan=plan,
            device=device,
            inputs=inputs,
            table=table,
            maker=maker,
            observer=observer,
            leaves=source.leaves,
            checked=source.checked,
            largest=source.largest,
            phase_of=phase_of or _phase_of_step(plan),
            current_step=running_step,
            fixed=by_name,
        )  # fmt: skip
    )
    if plan.when == "startup":
        with phase_of_start(observer, "capture", f"{len(program.pending)} sizes"):
            for phase, size in program.pending:
                program.capture(phase, size)
    observer(Ready())
    return program


def _settle(source: Source, plan: CapturePlan, observer: Observer) -> CapturePlan:
    """Refuse what the source cannot do, or lower it where that is allowed."""
    return replace(
        plan,
        decode=_settle_phase(source, plan.decode, plan, observer),
        prefill=_settle_phase(source, plan.prefill, plan, observer),
    )


def _settle_phase(source: Source, phase: PhaseCapture, plan: CapturePlan, observer: Observer) -> PhaseCapture:
    if not phase.is_captured:
        return phase
    if phase.capture == PIECEWISE and source.mode == "trace_once":
        raise CaptureError(
            f"{phase.phase} cannot be captured `piecewise`: the program holds no opaque operator to cut at",
            hint="capture it `full`, or declare the operators that may not be captured with split_op",
            facts={"phase": phase.phase},
        )
    check_legal(source.mode, phase.capture, phase.phase)
    too_large = [size for size in phase.sizes if size > source.largest]
    if too_large:
        raise OptionError(
            f"{phase.phase} size `{too_large[-1]}` is larger than the `{source.largest}` that the program serves",
            hint="capture smaller sizes, or compile for larger ones",
        )
    support = source.operators if source.mode in ("piecewise", "trace_once") else {}
    names = unsupported(phase, support)
    if names and plan.is_lowering_allowed:
        lowered = lowered_capture(source.mode)
        observer(Lowered(phase=phase.phase, asked=phase.capture, capture=lowered, operators=names))
        return replace(phase, capture=lowered, reason=f"lowered from {FULL}: {', '.join(names)}")
    check_support(phase, support, names)
    return phase


def _owners(source: Source, owners: Mapping[str, Any] | None) -> Owners:
    """Return who is known to hold tensors: whom the caller named, else the model; and always the program itself."""
    own: dict[str, Any] = {"": source.model} if source.model is not None else {}
    roots = dict(owners) if owners is not None else own
    if source.program is not None:
        roots["program" if roots else ""] = source.program
    return Owners(roots)


def _fix(source: Source, fixed: Mapping[str, Tensor]) -> list[Any]:
    """Mark the inputs that keep the caller's address; one that the model writes has to be among them."""
    found = []
    for leaf in source.leaves:
        if leaf.is_written and leaf.name not in fixed:
            raise CaptureError(
                f"the model writes to its input `{leaf.path}`, which a captured program would copy",
                hint=f"name it at capture, fixed={{'{leaf.path}': tensor}}, and pass that tensor in every call",
                facts={"input": leaf.path},
            )
        found.append(replace(leaf, is_written=leaf.name in fixed))
    return found


def _phase_of_step(plan: CapturePlan) -> Callable[[], str]:
    """Tell a step's phase by its counts: as many tokens as sequences is a decode step of one token each."""
    alone = plan.phases[0].phase if len(plan.phases) == 1 else ""

    def phase_of() -> str:
        step: Step | None = running_step()
        if step is None:
            return alone or PREFILL
        return DECODE if step.num_tokens == step.query_starts.shape[0] - 1 else PREFILL

    return phase_of
