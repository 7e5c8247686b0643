"""Find: the program record that a start can trust, without a trace."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from piecework.errors import ArtifactMissing, BindError, CorruptEntry
from piecework.events import FallBack, Observer, RecordHit, RecordMiss, phase
from piecework.seam.operators import changed_operators
from piecework.store.nearest import Nearest, Neighbours
from piecework.store.protocol import ARTIFACT, PROGRAM, SharedStore
from piecework.values.declaration import registry
from piecework.values.faults import program_fault
from piecework.values.key import key_of
from piecework.values.record import Record, record_from


def find_record(
    factors: Mapping[str, Any], store: SharedStore, observer: Observer, why_stale: Callable[[Record], str]
) -> tuple[str, Record] | None:
    """Return the first candidate under the factors in which nothing is stale; say why not.

    `why_stale` returns the first thing that a record's trace read and that is another now, or an empty string.
    """
    with phase(observer, "find"):
        return _first_fresh(factors, store, observer, why_stale)


def _first_fresh(
    factors: Mapping[str, Any], store: SharedStore, observer: Observer, why_stale: Callable[[Record], str]
) -> tuple[str, Record] | None:
    group = key_of(factors)
    reasons: list[str] = []
    for key in _candidates(store, group):
        try:
            record = _read(key, store)
            reason = _changed_split(record) or why_stale(record)
        except (ArtifactMissing, CorruptEntry) as error:
            reason = error.message
        else:
            if not reason:
                observer(RecordHit(key=key, layer=store.layer_of(PROGRAM, key)))
                tell_fall_backs(record, observer)
                return key, record
        reasons.append(reason)
    near = Nearest() if reasons else Neighbours(store, PROGRAM).nearest(factors)
    observer(
        RecordMiss(
            lookup=group,
            reason="; ".join(dict.fromkeys(reasons)) or "nothing is stored under these factors",
            factors=near.differences,
            nearest=str(near) if near.key else "",
        )
    )
    return None


def _candidates(store: SharedStore, group: str) -> Iterator[str]:
    """Yield what is near first: a remote is not asked where something near serves."""
    yield from store.list_records(PROGRAM, group)
    yield from store.more_records(PROGRAM, group)


def tell_fall_backs(record: Record, observer: Observer) -> None:
    """Say at each start what runs eager since its compilation failed, not only at the start that saw it fail."""
    for fallen in record.notes.get("fall_backs", ()):
        observer(FallBack(what=fallen["what"], reason=fallen["reason"]))


def deserves_more(record: Record, budget_s: float, is_verifying: bool) -> str:
    """Say what a record lacks that is asked for now, and an empty string if nothing.

    A piece may have outrun a smaller budget than `budget_s` (0: none) and run eager; artifacts may be untried.
    """
    for fallen in record.notes.get("fall_backs", ()):
        given_s = fallen["budget_s"]
        if given_s and not 0 < budget_s <= given_s:
            return f"{fallen['what']}, for it had {given_s:g} s to compile; now it may take longer"
    if is_verifying and record.notes.get("unverified"):
        return "its artifacts were compiled with `verify=False`, and now they are to be verified"
    return ""


def moved(record: Record, cpp_compiler: str) -> str:
    """Say that the C++ compiler, or an operator's declaration, is another one now; "" if neither.

    A machine without a C++ compiler takes what any has built.
    """
    if cpp_compiler and record.cpp_compiler not in ("", cpp_compiler):
        return f"the C++ compiler was `{record.cpp_compiler}` and is `{cpp_compiler}`"
    return changed_operators(record.declarations)


def _changed_split(record: Record) -> str:
    """Say which operator became a split point: a record must cut at all that are now."""
    for name in record.operators:
        short = name.partition(".")[0]
        declared = registry.get(short) is not None
        cut = any(op.partition(".")[0] == short for op in record.split_ops)
        if declared and not cut and not record.factors["config"]["options"].get("split_ops_only"):
            return f"operator `{short}` became a split point"
    return ""


def require_modules(record: Record) -> None:
    """Raise the error that names the module of an operator which this process has not registered."""
    for name in record.split_ops:
        short = name.partition(".")[0]
        module = record.operators.get(name) or next((m for n, m in record.operators.items() if n.startswith(short)), "")
        if registry.get(short) is None and module and module not in sys.modules:
            found = importlib.util.find_spec(module.partition(".")[0]) is not None
            raise BindError(
                f"operator `{short}` is not registered here; the program was traced with the one of module `{module}`",
                hint=f"import `{module}` first"
                if found
                else f"install the package that holds `{module}`, then import it",
                facts={"operator": short, "module": module},
            )


def _read(key: str, store: SharedStore) -> Record:
    """Return a program's record; one that is not what its key was made of is set aside, and a miss."""
    found = store.read_record(PROGRAM, key)
    if fault := program_fault(key, found):
        store.set_aside(PROGRAM, key, fault)
        raise ArtifactMissing(f"the program `{key[:12]}`: {fault}", facts={"key": key, "reason": fault})
    return record_from(found)


def read_program(key: str, store: SharedStore) -> Record:
    """Return the record of a program by its key."""
    try:
        return _read(key, store)
    except ArtifactMissing as error:
        known = len(store.list_records(PROGRAM))
        raise ArtifactMissing(
            f"no program is stored under key `{key}`",
            hint=f"the store holds {known} program(s); `piecework store ls` lists them",
            facts={"key": key},
        ) from error


def with_siblings(record: Record, store: SharedStore) -> tuple[Record, ...]:
    """Return a record and those that serve its other sizes."""
    return (record, *(read_program(key, store) for key in record.siblings))


def require_artifacts(record: Record, store: SharedStore) -> None:
    """Raise ArtifactMissing unless everything that a start from the record reads is in the store, and whole."""
    for one in with_siblings(record, store):
        store.read_blob(one.constants)
        for piece in one.pieces:
            store.read_blob(piece.text)
            for key in piece.artifacts.values():
                artifact = store.read_record(ARTIFACT, key)
                for digest in (artifact["text"], *artifact["kernels"].values()):
                    store.read_blob(digest)
