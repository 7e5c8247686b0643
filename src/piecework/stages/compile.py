"""Compile: each distinct piece, once per box, unless the store holds it already.

What the compiler makes is checked, goes to the store and is read back from there by `load`, on a cold start as on a
warm one. A piece that does not compile, takes longer than its budget or fails its check runs as its text, loudly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from piecework.errors import ArtifactMissing, CompileError, CompileForbidden, PassError
from piecework.events import (
    ArtifactCompiled,
    ArtifactReused,
    FallBack,
    Observer,
    PassDone,
    RangeSplit,
    VerificationFailed,
    Verified,
)
from piecework.seam.torch_trace import traced_as_subject
from piecework.span_events import waiting
from piecework.spans import carry, spanning
from piecework.store.artifacts import read_artifact, write_artifact
from piecework.store.nearest import Neighbours
from piecework.store.protocol import ARTIFACT, SharedStore
from piecework.values.artifact import Artifact, Compiler
from piecework.values.digest import digest_text
from piecework.values.faults import artifact_fault
from piecework.values.key import artifact_factors, key_of
from piecework.values.narrow import MOST_PARTS, Part, kept_box, rest_of
from piecework.values.shapes import Box, format_box
from piecework.values.verdict import FAILED, HELD, UNTRIED, Check, Verdict, let_pass


@dataclass(frozen=True)
class Job:
    """One piece to compile for one box."""

    number: int
    text: str
    box_text: str
    box: Box

    @property
    def name(self) -> str:
        return f"piece {self.number} ({digest_text(self.text)[:8]})"


@dataclass(frozen=True)
class Line:
    """What every job goes through: the compiler and what stands in for it, the check, and the store that keeps."""

    compiler: Compiler
    fall_back: Compiler
    toolchain: Mapping[str, str]
    store: SharedStore
    observer: Observer
    neighbours: Neighbours
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    budget_s: float = 0.0
    check: Check = let_pass
    checking: Lock = field(default_factory=Lock)


def compile_jobs(
    jobs: Sequence[Job],
    compiler: Compiler,
    fall_back: Compiler,
    toolchain: Mapping[str, str],
    store: SharedStore,
    observer: Observer,
    *,
    environment: Mapping[str, Mapping[str, str]] | None = None,
    cpp_compiler: str = "",
    budget_s: float = 0.0,
    threads: int = 1,
    check: Check = let_pass,
) -> dict[tuple[int, str], tuple[Part, ...]]:
    """Return the parts of every job's box with their artifacts' keys; compile, check and store what is missing.

    `threads` jobs go on side by side: one is lowered at a time, while the C++ of others is built; checks wait for
    one another, so that no more than one piece's memory is held for them.

    A box has one part, unless the compiler assumed more of the sizes than the box says: then the artifact serves the
    part where that holds, and what is left is compiled as boxes of its own.
    """
    tools = {**toolchain, "cpp_compiler": cpp_compiler} if cpp_compiler else toolchain
    near = Neighbours(store, ARTIFACT)
    line = Line(compiler, fall_back, tools, store, observer, near, environment or {}, budget_s, check)

    def serve(job: Job) -> tuple[Part, ...]:
        return _serve(job, line)

    with (
        compiler if isinstance(compiler, AbstractContextManager) else nullcontext(),
        ThreadPoolExecutor(max_workers=threads, thread_name_prefix="piecework-compile") as pool,
    ):
        if hasattr(compiler, "expect"):
            compiler.expect(len(jobs))
        parts = list(pool.map(carry(serve), jobs))
    return {(job.number, job.box_text): found for job, found in zip(jobs, parts, strict=True)}


def _serve(job: Job, line: Line) -> tuple[Part, ...]:
    waiting = [job]
    parts: list[Part] = []
    while waiting:
        here = waiting.pop(0)
        part = _ensure(here, line, may_cut=len(parts) + len(waiting) + 2 <= MOST_PARTS)
        parts.append(part)
        waiting += [Job(job.number, job.text, format_box(box), box) for box in rest_of(here.box, part.box)]
    if len(parts) > 1:
        line.observer(RangeSplit(piece=job.name, range=job.box_text, parts=tuple(format_box(p.box) for p in parts)))
    return tuple(parts)


def _ensure(job: Job, line: Line, may_cut: bool) -> Part:
    version = {"name": line.compiler.name, "version": line.compiler.version}
    factors = artifact_factors(job.text, job.box_text, version, line.toolchain, line.environment)
    key = key_of(factors)
    stored = _stored_part(line, key, job, may_cut)
    if stored is None:
        with line.store.single_flight(key, lambda: _stored_part(line, key, job, may_cut) is not None) as flight:
            stored = None if flight.owned else _stored_part(line, key, job, may_cut)
            if stored is None:
                return _make(job, line, Part(job.box, key), factors, may_cut)
    layer = line.store.layer_of(ARTIFACT, key)
    line.observer(ArtifactReused(piece=job.name, range=format_box(stored.box), key=key, layer=layer))
    if line.check is not let_pass and "verified" not in line.store.read_record(ARTIFACT, key)["facts"]:
        _catch_up(job, line, stored, factors)
    return stored


def _catch_up(job: Job, line: Line, part: Part, factors: Mapping[str, Any]) -> None:
    """Try an artifact that was stored without having been tried, and note in its record what came of it."""
    found = read_artifact(line.store, part.key)
    artifact, reason = _try(job, line, part.box, found)
    if reason:
        artifact = _stand_in(job, line, reason, artifact.facts.get("errors", {}))
    if artifact.facts != found.facts:
        write_artifact(line.store, part.key, artifact, factors)


def _make(job: Job, line: Line, part: Part, factors: Mapping[str, Any], may_cut: bool) -> Part:
    near = line.neighbours.nearest(factors, like={"piece": factors["piece"]})
    started = time.perf_counter_ns()
    with spanning(line.observer, f"{job.name} for {job.box_text}") as span:
        served, used, size_bytes = _make_part(job, line, part, factors, may_cut)
    line.observer(
        ArtifactCompiled(
            piece=job.name, range=format_box(served.box), key=part.key, compiler=used, size_bytes=size_bytes,
            factors=near.differences, nearest=str(near) if near.key else "", start_ns=started, span=span,
        )  # fmt: skip
    )
    return served


def _make_part(
    job: Job, line: Line, part: Part, factors: Mapping[str, Any], may_cut: bool
) -> tuple[Part, str, int]:
    """Compile, check and store; return the part that is served, the compiler that made it, and its size."""
    artifact, used = _compile(job, line)
    for one in artifact.facts.get("passes", ()):
        said = {name: one[name] for name in ("name", "version", "runs_on", "matches", "note")}
        line.observer(PassDone(**said, piece=f"{job.name} at {job.box_text}"))
    kept = _part_of(artifact.guards, job.box, may_cut)
    reason = f"it assumes `{' and '.join(artifact.guards)}`, at which its sizes cannot be cut" if kept is None else ""
    if kept is not None:
        artifact, reason = _try(job, line, kept, artifact)
    if reason:
        artifact, used = _stand_in(job, line, reason, artifact.facts.get("errors", {})), line.fall_back.name
    served = Part(job.box if reason or kept is None else kept, part.key)
    write_artifact(line.store, part.key, artifact, factors)
    return served, used, artifact.size_bytes


def _try(job: Job, line: Line, box: Box, artifact: Artifact) -> tuple[Artifact, str]:
    """Return an artifact with what its trial adds to its record, and the reason where it may not serve."""
    verdict, reason = _check(job, line, box, artifact), ""
    if verdict.outcome == FAILED:
        line.observer(VerificationFailed(piece=job.name, range=format_box(box), reason=verdict.reason))
        reason = f"it is not served: {verdict.reason}"
    return replace(artifact, facts={**artifact.facts, **verdict.facts}), reason


def _check(job: Job, line: Line, box: Box, artifact: Artifact) -> Verdict:
    """Try an artifact; its kernels go to the store first, whence the loader takes them."""
    if line.check is let_pass:
        return Verdict(UNTRIED)
    for data in artifact.kernels.values():
        line.store.write_blob(data)
    with waiting(line.checking, "the check of another piece"):
        started = time.perf_counter_ns()
        with spanning(line.observer) as span:
            verdict = line.check(job.number, job.text, box, artifact)
    if verdict.outcome == HELD or verdict.reason:
        line.observer(
            Verified(
                piece=job.name, range=format_box(box), outcome=verdict.outcome, reason=verdict.reason,
                start_ns=started, span=span,
            )  # fmt: skip
        )
    return verdict


def _part_of(guards: Sequence[str], box: Box, may_cut: bool) -> Box | None:
    kept = kept_box(guards, box) if guards else box
    return kept if kept is not None and (may_cut or kept == box) else None


def _compile(job: Job, line: Line) -> tuple[Artifact, str]:
    try:
        artifact = _within(line.budget_s, lambda: _traced(job, line))
    except CompileForbidden:
        raise
    except PassError as error:
        facts = {**error.facts, "piece": job.number, "range": job.box_text}
        raise PassError(f"{error.message} (in {job.name} at {job.box_text})", hint=error.hint, facts=facts) from error
    except CompileError as error:
        reason = error.message
    except OutOfTime:
        reason = f"compiling took longer than the budget of {line.budget_s:g} s"
        artifact = _stand_in(job, line, reason)
        return replace(artifact, facts={**artifact.facts, "budget_s": line.budget_s}), line.fall_back.name
    else:
        if artifact.facts.get("fall_back"):
            line.observer(FallBack(what=f"{job.name} at {job.box_text}", reason=str(artifact.facts["fall_back"])))
        return artifact, line.compiler.name
    return _stand_in(job, line, reason), line.fall_back.name


def _traced(job: Job, line: Line) -> Artifact:
    with traced_as_subject(job.text):
        return line.compiler.compile(job.text, job.box)


def _stand_in(job: Job, line: Line, reason: str, errors: Mapping[str, Any] | None = None) -> Artifact:
    """Return what runs instead of what the compiler made, or could not make."""
    line.observer(FallBack(what=f"{job.name} at {job.box_text} runs eager", reason=reason))
    artifact = line.fall_back.compile(job.text, job.box)
    facts = {**artifact.facts, "fall_back": reason} | ({"verified": "failed", "errors": errors} if errors else {})
    return replace(artifact, facts=facts)


def _within(budget_s: float, work: Callable[[], Artifact]) -> Artifact:
    """Run `work` within its budget; work that outruns it goes on in its thread, and its result is dropped.

    The thread is a daemon: the process may end while it is at work. A compiler that takes one piece at a time makes
    the pieces after it wait, and their budgets run meanwhile.
    """
    if not budget_s:
        return work()
    outcome: Future[Artifact] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is raised where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=carry(run), name="piecework-compile", daemon=True).start()
    return outcome.result(timeout=budget_s)


def _stored_part(line: Line, key: str, job: Job, may_cut: bool) -> Part | None:
    """Return the part of a job's box that a stored artifact serves; None where there is none that is whole.

    One that stands in for a piece that outran a smaller budget does not count.
    """
    store = line.store
    try:
        record = store.read_record(ARTIFACT, key)
    except ArtifactMissing:
        return None
    if fault := artifact_fault(key, record):
        store.set_aside(ARTIFACT, key, fault)
        return None
    if not (store.has_blob(record["text"]) and all(store.has_blob(digest) for digest in record["kernels"].values())):
        return None
    given_s = record["facts"].get("budget_s", 0)
    is_another = record["factors"].get("piece") != digest_text(job.text)
    if is_another or (given_s and not 0 < line.budget_s <= given_s):
        return None
    kept = _part_of(tuple(record["guards"]), job.box, may_cut)
    return None if kept is None else Part(kept, key)
