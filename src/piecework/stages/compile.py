"""Compile: each distinct piece, once per box, unless the store holds it already.

What the compiler makes goes to the store and is read back from there by `load`, on a cold start as on a
warm one. A piece that does not compile, or takes longer than its budget, runs as its text, loudly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from piecework.errors import ArtifactMissing, CompileError
from piecework.events import ArtifactCompiled, ArtifactReused, FallBack, Observer
from piecework.store.protocol import ARTIFACT, SharedStore, Store
from piecework.values.artifact import Artifact, Compiler
from piecework.values.digest import digest_text
from piecework.values.key import artifact_factors, key_of
from piecework.values.shapes import Box


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


def compile_jobs(
    jobs: Sequence[Job],
    compiler: Compiler,
    fall_back: Compiler,
    toolchain: Mapping[str, str],
    store: SharedStore,
    observer: Observer,
    *,
    budget_s: float = 0.0,
) -> dict[tuple[int, str], str]:
    """Return the artifact's key for every job; compile and store what is missing."""
    with compiler if isinstance(compiler, AbstractContextManager) else nullcontext():
        return {
            (job.number, job.box_text): _ensure(job, compiler, fall_back, toolchain, store, observer, budget_s)
            for job in jobs
        }


def _ensure(
    job: Job,
    compiler: Compiler,
    fall_back: Compiler,
    toolchain: Mapping[str, str],
    store: SharedStore,
    observer: Observer,
    budget_s: float,
) -> str:
    factors = artifact_factors(job.text, job.box_text, {"name": compiler.name, "version": compiler.version}, toolchain)
    key = key_of(factors)
    if _is_stored(store, key):
        observer(ArtifactReused(piece=job.name, range=job.box_text, key=key))
        return key
    with store.single_flight(key, lambda: _is_stored(store, key)) as flight:
        if not flight.owned:
            observer(ArtifactReused(piece=job.name, range=job.box_text, key=key))
            return key
        started = time.perf_counter_ns()
        artifact, used = _compile(job, compiler, fall_back, observer, budget_s)
        write_artifact(store, key, artifact, factors)
    observer(
        ArtifactCompiled(
            piece=job.name,
            range=job.box_text,
            key=key,
            compiler=used,
            size_bytes=artifact.size_bytes,
            start_ns=started,
            end_ns=time.perf_counter_ns(),
        )
    )
    return key


def _compile(
    job: Job, compiler: Compiler, fall_back: Compiler, observer: Observer, budget_s: float
) -> tuple[Artifact, str]:
    try:
        artifact = _within(budget_s, lambda: compiler.compile(job.text, job.box))
    except CompileError as error:
        reason = error.message
    except OutOfTime:
        reason = f"compiling took longer than the budget of {budget_s:g} s"
    else:
        if artifact.facts.get("fall_back"):
            observer(FallBack(what=f"{job.name} at {job.box_text}", reason=str(artifact.facts["fall_back"])))
        return artifact, compiler.name
    observer(FallBack(what=f"{job.name} at {job.box_text} runs eager", reason=reason))
    artifact = fall_back.compile(job.text, job.box)
    return Artifact(
        artifact.kind, artifact.text, artifact.kernels, artifact.guards, {**artifact.facts, "fall_back": reason}
    ), fall_back.name


def _within(budget_s: float, work: Callable[[], Artifact]) -> Artifact:
    """Run `work` within its budget; work that outruns it goes on in its thread, and its result is dropped."""
    if not budget_s:
        return work()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="piecework-compile")
    try:
        return pool.submit(work).result(timeout=budget_s)
    finally:
        pool.shutdown(wait=False)


def _is_stored(store: Store, key: str) -> bool:
    try:
        record = store.read_record(ARTIFACT, key)
    except ArtifactMissing:
        return False
    return store.has_blob(record["text"]) and all(store.has_blob(digest) for digest in record["kernels"].values())


def write_artifact(store: Store, key: str, artifact: Artifact, factors: Mapping[str, Any]) -> None:
    """Write an artifact's blobs, then its record."""
    kernels = {name: store.write_blob(data) for name, data in artifact.kernels.items()}
    record = {
        "kind": artifact.kind,
        "text": store.write_blob(artifact.text.encode()),
        "kernels": kernels,
        "guards": list(artifact.guards),
        "facts": dict(artifact.facts),
        "factors": dict(factors),
        "size_bytes": artifact.size_bytes,
    }
    store.write_record(ARTIFACT, key, record)
