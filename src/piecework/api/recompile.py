"""Compile a store's artifacts again from their pieces' texts, and compare: an audit that needs no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from piecework.api.stores import report_to_log
from piecework.compilers import NAMES, select_compiler
from piecework.compilers.eager import EagerCompiler
from piecework.engine.requests import surroundings_of
from piecework.env import read_variables
from piecework.errors import StoreError
from piecework.events import Observer
from piecework.seam.surroundings import variables
from piecework.store.protocol import ARTIFACT, PROGRAM, Store
from piecework.store.verifying import Difference, VerifyingStore
from piecework.values.artifact import keeping_apart
from piecework.values.graph import inside
from piecework.values.key import artifact_factors, differing
from piecework.values.record import record_from
from piecework.values.shapes import parse_box


@dataclass(frozen=True)
class Recompiled:
    """What an audit found: artifacts compared, those that differ, and those that cannot be made here, with why."""

    compared: int
    differences: tuple[Difference, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def recompile(store: Store, *, observer: Observer | None = None) -> Recompiled:
    """Compile every artifact of this toolchain in a store again, and compare with what lies there; writes nothing.

    Made of the pieces' texts that program records name: no model, no weights. Artifacts of another toolchain,
    compiler or environment are skipped.
    """
    from piecework.stages.compile import Job, compile_jobs

    audit = VerifyingStore(store, observer=observer or report_to_log)
    skipped: dict[str, str] = {}
    for number, (key, (text, device, apart)) in enumerate(sorted(_artifacts(store, skipped).items())):
        try:
            factors = store.read_record(ARTIFACT, key)["factors"]
        except StoreError as error:
            skipped[key] = error.message
            continue
        name, box = factors["compiler"]["name"], factors["range"]
        if name not in NAMES:
            skipped[key] = f"compiler `{name}` is an object of another process"
            continue
        tools, around, cpp = surroundings_of(device, name, read_variables((*variables(device), "CXX")))
        compiler = keeping_apart(select_compiler(name), apart)
        version = {"name": name, "version": compiler.version}
        whole = {**tools, "cpp_compiler": cpp} if cpp else tools
        moved = differing(factors, artifact_factors(text, box, version, whole, around))
        if moved:
            skipped[key] = "; ".join(moved)
            continue
        job = Job(number, text, box, parse_box(box))
        compile_jobs(
            [job], compiler, EagerCompiler(), tools, audit, audit.observer, environment=around, cpp_compiler=cpp
        )
    return Recompiled(audit.compared, tuple(audit.differences), skipped)


def _artifacts(store: Store, skipped: dict[str, str]) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Return the artifacts that program records name, with the piece's text, its device and opaque operators inside."""
    found: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    for key in store.list_records(PROGRAM):
        try:
            record: Any = record_from(store.read_record(PROGRAM, key))
            for piece in record.pieces:
                text = store.read_blob(piece.text).decode()
                apart = inside(record.partition, record.split_ops)
                found |= dict.fromkeys(piece.artifacts.values(), (text, record.device, apart))
        except StoreError as error:
            skipped[key] = error.message
    return found
