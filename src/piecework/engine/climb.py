"""From eager to compiled to captured while requests are served: one generator, which gives way at each `yield`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from piecework.engine.aside import aside, fewer_threads
from piecework.engine.compiling import Compiling, Job
from piecework.engine.events import CompileProcess
from piecework.engine.generate import StepFunction
from piecework.engine.options import Progress
from piecework.engine.tiers import CAPTURED, COMPILED, Tiers
from piecework.errors import CompileError, ParallelError, PieceworkError
from piecework.events import FallBack, Observer, VerificationFailed
from piecework.runtime.idle import Capturable
from piecework.runtime.program import Program
from piecework.stages.find import read_program, with_siblings
from piecework.stages.verify import Verification
from piecework.store.artifacts import read_artifact, write_artifact
from piecework.store.protocol import ARTIFACT, PROGRAM, KernelStore
from piecework.values.artifact import TEXT, Artifact
from piecework.values.record import Record
from piecework.values.shapes import parse_box
from piecework.values.verdict import FAILED, Verdict

ATTEMPTS = 2
STEPS_BESIDE = 3
STATIC = ("weight", "buffer", "constant")
Bind = Callable[[str, Record], Program]
StepOf = Callable[[Any], StepFunction]
Trial = Callable[[], Verdict]


@dataclass(frozen=True)
class Plan:
    """What a climb goes by: where records and weights are, and how a record becomes a step function.

    `key` is a record that is in the store already and has only to be proven, and `bound` its program. `job` makes one
    where there is none, or where that one is found wrong; without a job the pieces that are wrong run as their texts.
    `capture` makes tier 2 of a program, None where nothing is captured; `on_proven` hears the key of what serves.
    Where several ranks share the model, `apart` lets this one run a piece by itself, which is done between two steps.
    """

    store: KernelStore
    bind: Bind
    step_of: StepOf
    job: Job | None = None
    key: str = ""
    bound: Program | None = None
    capture: Callable[[Program], Any] | None = None
    idle_ms: float = 50.0
    steps_beside: int = STEPS_BESIDE
    on_compiling: Callable[[Compiling], None] = field(default=lambda compiling: None)
    on_proven: Callable[[str], None] = field(default=lambda key: None)
    apart: Callable[[], AbstractContextManager[None]] | None = None


@dataclass(frozen=True)
class Fault:
    """An artifact that does not give what its piece's text gives."""

    key: str
    name: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} is not served: {self.reason}"


def climb(tiers: Tiers, plan: Plan, observer: Observer) -> Iterator[None]:
    """Compile, load, prove and swap in the program; then capture it where that is done.

    What is found wrong in the store is set aside, and made anew once; what is wrong again runs as its text.
    """
    program: Program | None = None
    if plan.job is None:
        program = yield from _prove(tiers, plan, plan.key, observer, is_last=True)
    else:
        program = yield from _first_try(tiers, plan, plan.job, observer)
    if program is None and plan.job is not None:
        key = yield from _compile(tiers, plan.job, plan, observer)
        program = yield from _prove(tiers, plan, key, observer, is_last=True)
    assert program is not None
    if plan.capture is not None:
        yield from capture(tiers, plan.capture(program), plan.step_of, plan.idle_ms)


def _first_try(tiers: Tiers, plan: Plan, job: Job, observer: Observer) -> Generator[None, None, Program | None]:
    """Serve what the store holds, or what is compiled first; None where it is wrong."""
    key = plan.key or (yield from _compile(tiers, job, plan, observer))
    try:
        return (yield from _prove(tiers, plan, key, observer, is_last=False))
    except ParallelError:
        raise
    except PieceworkError as error:
        observer(FallBack(what="the first program is made anew", reason=error.message))
        return None


def _prove(
    tiers: Tiers, plan: Plan, key: str, observer: Observer, *, is_last: bool
) -> Generator[None, None, Program]:
    """Load a program, hold it to eager, and swap it in. Raises CompileError where it is wrong."""
    record = read_program(key, plan.store)
    # What was bound at the start is no longer what the store holds once anything was made anew.
    is_bound = plan.bound is not None and (plan.job is None or not is_last)
    program = plan.bound if is_bound else (yield from _load(plan, key, record))
    assert program is not None
    faults = yield from _verify(tiers, plan, record, program, observer)
    for fault in faults:
        if is_last:
            _stand_in(plan.store, fault, observer)
        else:
            plan.store.set_aside(ARTIFACT, fault.key, fault.reason)
    if faults and not is_last:
        raise CompileError("; ".join(map(str, faults)), hint="it is compiled anew")
    if faults:
        program = yield from _load(plan, key, record)
    step = plan.step_of(program)
    reason = yield from tiers.beside(step, plan.steps_beside)
    if reason:
        plan.store.set_aside(PROGRAM, key, reason)
        raise CompileError(f"the program is not served: {reason}", hint="`piecework bisect` finds where it differs")
    tiers.swap_in(COMPILED, step, key)
    plan.on_proven(key)
    return program


def _stand_in(store: KernelStore, fault: Fault, observer: Observer) -> None:
    """Write a piece's text in the place of an artifact that is wrong, so that no later start serves or tries it."""
    record = store.read_record(ARTIFACT, fault.key)
    facts = {"fall_back": f"it is not served: {fault.reason}", "verified": "failed"}
    write_artifact(store, fault.key, Artifact(TEXT, fault.text, facts=facts), record["factors"])
    observer(FallBack(what=f"{fault.name} runs eager", reason=fault.reason))


def capture(tiers: Tiers, captured: Any, step_of: StepOf, idle_ms: float) -> Iterator[None]:
    """Capture some sizes at a time, in gaps and between steps; each serves once it is captured."""
    pending: Capturable = captured
    total = len(pending.pending)
    tiers.swap_in(CAPTURED, step_of(captured), f"{total} sizes to capture")
    while pending.pending:
        tiers.progress = Progress("capturing", total - len(pending.pending), total)
        captured.capture_some(idle_ms)
        yield


def _compile(tiers: Tiers, job: Job, plan: Plan, observer: Observer) -> Generator[None, None, str]:
    """Run the compile process; one that is lost without a word gets a second try, which finds what was stored."""

    def note(text: str) -> None:
        observer(FallBack(what="the compile process", reason=text))

    for attempt in range(ATTEMPTS):
        compiling = Compiling(job, note)
        observer(CompileProcess(what="started", pid=compiling.pid))
        plan.on_compiling(compiling)
        try:
            with fewer_threads():
                while compiling.is_running:
                    tiers.progress = Progress("compiling", compiling.done, max(compiling.total, compiling.done + 1))
                    yield
        finally:
            compiling.close()
        if compiling.key:
            observer(CompileProcess(what="done", pid=compiling.pid, detail=compiling.key))
            return compiling.key
        observer(CompileProcess(what="lost" if compiling.is_lost else "failed", pid=compiling.pid))
        if not compiling.is_lost or attempt + 1 == ATTEMPTS:
            break
    raise CompileError(compiling.ending, hint="the log of the compile process says more; eager goes on serving")


def _load(plan: Plan, key: str, record: Record) -> Generator[None, None, Program]:
    """Read and bind the program aside: opening its kernels takes longer than a step may."""
    return (yield from aside(lambda: plan.bind(key, record)))


def _verify(
    tiers: Tiers, plan: Plan, record: Record, program: Program, observer: Observer
) -> Generator[None, None, list[Fault]]:
    """Run every artifact beside its piece's text with the model's own weights, aside; return the wrong."""
    trials = [trial for one in with_siblings(record, plan.store) for trial in _trials(plan, one, program.weights)]
    faults = []
    for done, (number, box, key, text, run) in enumerate(trials):
        tiers.progress = Progress("verifying", done, len(trials))
        verdict = yield from (aside(run) if plan.apart is None else _between(plan.apart, run))
        if verdict.outcome == FAILED:
            observer(VerificationFailed(piece=f"piece {number}", range=box, reason=verdict.reason))
            faults.append(Fault(key, f"piece {number} for `{box}`", text, verdict.reason))
    tiers.progress = Progress("verifying", len(trials), max(1, len(trials)), "beside steps")
    return faults


def _between(
    apart: Callable[[], AbstractContextManager[None]], run: Trial
) -> Generator[None, None, Verdict]:
    """Run a trial between two steps: the name that its collectives ask for is then nobody else's."""
    yield
    with apart():
        return run()


def _trials(
    plan: Plan, record: Record, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[int, str, str, str, Trial]]:
    verification = Verification(plan.store.kernel_path, lambda number: site_weights(record, number, weights))
    for number, piece in enumerate(record.pieces):
        text = plan.store.read_blob(piece.text).decode()
        for box, key in piece.artifacts.items():
            artifact = read_artifact(plan.store, key)
            yield number, box, key, text, partial(verification, number, text, parse_box(box), artifact)


def site_weights(record: Record, number: int, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the weights of a piece's first site in the text's order; None where one of them is not to be had.

    Tensors:
        weights  [...]  any  by qualified name
        ->       [...]  any
    """
    site = next(region for region in record.regions if region["kind"] == "piece" and region["piece"] == number)
    names = [
        record.values[name]["name"]
        for name in site["arguments"]
        if name in record.values and record.values[name]["kind"] in STATIC
    ]
    if not names or any(name not in weights for name in names):
        return None
    return [weights[name].detach() for name in names]
