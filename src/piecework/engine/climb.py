"""From eager to compiled to captured while requests are served: one generator, which gives way at each `yield`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from piecework.engine.compiling import Compiling, Job
from piecework.engine.events import CompileProcess
from piecework.engine.generate import StepFunction
from piecework.engine.options import Progress
from piecework.engine.tiers import CAPTURED, COMPILED, Tiers
from piecework.errors import CompileError
from piecework.events import FallBack, Observer, VerificationFailed
from piecework.runtime.idle import Capturable
from piecework.runtime.program import Program
from piecework.stages.find import read_program, with_siblings
from piecework.stages.verify import Verification
from piecework.store.protocol import ARTIFACT, KernelStore
from piecework.values.artifact import Artifact
from piecework.values.record import Record
from piecework.values.shapes import parse_box
from piecework.values.verdict import FAILED

ATTEMPTS = 2
STEPS_BESIDE = 3
STATIC = ("weight", "buffer", "constant")
Bind = Callable[[str, Record], Program]
StepOf = Callable[[Any], StepFunction]
Trial = Callable[[], Generator[None, None, Any]]


@dataclass(frozen=True)
class Plan:
    """What a climb goes by: where records and weights are, and how a record becomes a step function.

    `job` is None where the record `key` is in the store already and has only to be verified. `capture` makes tier 2 of
    a program, and is None where nothing is captured.
    """

    store: KernelStore
    bind: Bind
    step_of: StepOf
    job: Job | None = None
    key: str = ""
    capture: Callable[[Program], Any] | None = None
    idle_ms: float = 50.0
    steps_beside: int = STEPS_BESIDE
    on_compiling: Callable[[Compiling], None] = field(default=lambda compiling: None)


def climb(tiers: Tiers, plan: Plan, observer: Observer) -> Iterator[None]:
    """Compile, load, verify and swap in the program; then capture it where that is done."""
    key = plan.key if plan.job is None else (yield from _compile(tiers, plan.job, plan, observer))
    record = read_program(key, plan.store)
    program = yield from _load(plan, key, record)
    yield from _verify(tiers, plan, record, program, observer)
    step = plan.step_of(program)
    fault = yield from tiers.beside(step, plan.steps_beside)
    if fault:
        raise CompileError(f"the program is not served: {fault}", hint="`piecework bisect` finds where it differs")
    tiers.swap_in(COMPILED, step, key)
    if plan.capture is not None:
        yield from capture(tiers, plan.capture(program), plan.step_of, plan.idle_ms)


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
    """Read and bind the program in a thread of its own: opening its kernels takes longer than a step may."""
    found: list[Program | BaseException] = []

    def load() -> None:
        try:
            found.append(plan.bind(key, record))
        except BaseException as error:  # noqa: BLE001  it is raised where the program is waited for
            found.append(error)

    thread = threading.Thread(target=load, name="piecework-load", daemon=True)
    thread.start()
    while thread.is_alive():
        yield
    program = found[0]
    if isinstance(program, BaseException):
        raise program
    return program


def _verify(
    tiers: Tiers, plan: Plan, record: Record, program: Program, observer: Observer
) -> Iterator[None]:
    """Run every artifact beside its piece's text with the model's own weights, a size at a time."""
    trials = [trial for one in with_siblings(record, plan.store) for trial in _trials(plan, one, program.weights)]
    for done, (name, box, run) in enumerate(trials):
        tiers.progress = Progress("verifying", done, len(trials))
        verdict = yield from run()
        if verdict.outcome == FAILED:
            observer(VerificationFailed(piece=name, range=box, reason=verdict.reason))
            raise CompileError(f"{name} for `{box}` is not served: {verdict.reason}", hint="it is compiled anew later")
    tiers.progress = Progress("verifying", len(trials), max(1, len(trials)), "beside steps")


def _trials(plan: Plan, record: Record, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, Trial]]:
    verification = Verification(plan.store.kernel_path, lambda number: site_weights(record, number, weights))
    for number, piece in enumerate(record.pieces):
        text = plan.store.read_blob(piece.text).decode()
        for box, key in piece.artifacts.items():
            artifact = _read_artifact(plan.store, key)

            def run(
                number: int = number, text: str = text, box: str = box, artifact: Artifact = artifact
            ) -> Generator[None, None, Any]:
                return verification.trials(number, text, parse_box(box), artifact)

            yield f"piece {number}", box, run


def _read_artifact(store: KernelStore, key: str) -> Artifact:
    record = store.read_record(ARTIFACT, key)
    text = store.read_blob(record["text"]).decode()
    kernels = {name: store.read_blob(digest) for name, digest in record["kernels"].items()}
    return Artifact(record["kind"], text, kernels, tuple(record["guards"]), dict(record["facts"]))


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
