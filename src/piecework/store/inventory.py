"""What a store holds: listed, counted, shown, compared and verified, without leaving a trace of having looked."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from piecework.errors import ArtifactMissing, OptionError, StoreError
from piecework.events import ignore
from piecework.store.disk import DiskStore
from piecework.store.entries import Entries
from piecework.store.envelope import decode_record
from piecework.store.files import last_use, list_folder, open_folder
from piecework.store.layout import (
    BLOBS,
    FORMAT,
    QUARANTINE,
    RECORDS,
    STAGING,
    Parts,
    blob_parts,
    is_digest,
    is_kind,
    names_in,
    record_parts,
    signature_parts,
)
from piecework.store.protocol import PROGRAM
from piecework.values.sources import readable_source

Name = tuple[str, str]


@dataclass(frozen=True)
class StoredRecord:
    """One record as it lies in the folder; times are seconds since 1970."""

    kind: str
    key: str
    size_bytes: int
    blobs: Mapping[str, int]  # digest -> bytes, of those it refers to that are here
    records: tuple[Name, ...]  # other records that it refers to
    written_s: float
    last_use_s: float
    is_signed: bool

    @property
    def name(self) -> Name:
        return self.kind, self.key

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the record and of every blob it refers to."""
        return self.size_bytes + sum(self.blobs.values())


@dataclass(frozen=True)
class Statistics:
    """How much a store holds."""

    path: str
    format: int
    records: Mapping[str, int] = field(default_factory=dict)  # kind -> count
    record_bytes: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    unreferenced_blobs: int = 0
    quarantined: int = 0
    being_written: int = 0

    @property
    def total_bytes(self) -> int:
        return self.record_bytes + self.blob_bytes


@dataclass(frozen=True)
class Fault:
    """An entry that would not be loaded, and why."""

    path: str
    reason: str


def list_entries(root: Path, top: Parts, depth: int) -> Iterator[tuple[Parts, os.stat_result]]:
    """Yield whatever lies `depth` folders below `top`, and what is no folder above that; links are not followed."""
    for name in list_folder(root, top):
        with suppress(OSError):
            with open_folder(root, top) as folder:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if depth and stat.S_ISDIR(status.st_mode):
                yield from list_entries(root, (*top, name), depth - 1)
            else:
                yield (*top, name), status


def blob_sizes(store: DiskStore) -> dict[str, int]:
    """Return the digest and size of every blob in the folder, unverified."""
    files = list_entries(store.path, (BLOBS,), 1)
    return {parts[-1]: status.st_size for parts, status in files if _is_blob(parts) and stat.S_ISREG(status.st_mode)}


def _is_blob(parts: Parts) -> bool:
    return is_digest(parts[-1]) and parts == blob_parts(parts[-1])


def list_names(store: DiskStore, kind: str = "") -> list[Name]:
    """Return kind and key of every record, or of those of one kind."""
    kinds = [kind] if kind else [name for name in list_folder(store.path, (RECORDS,)) if is_kind(name)]
    return [(each, key) for each in kinds for key in store.list_records(each)]


def list_stored(store: DiskStore, kind: str = "", blobs: Mapping[str, int] | None = None) -> list[StoredRecord]:
    """Return every record that can be loaded, in order; damaged ones are told as a read tells them."""
    store.entries.check_folder()
    sizes, known, found = blobs if blobs is not None else blob_sizes(store), list_names(store), []
    by_key: dict[str, list[Name]] = {}
    for name in known:
        by_key.setdefault(name[1], []).append(name)
    for name in known:
        if kind and name[0] != kind:
            continue
        with suppress(ArtifactMissing, FileNotFoundError):  # gone meanwhile
            found.append(_describe(store, name, sizes, by_key))
    return found


def _describe(
    store: DiskStore, name: Name, sizes: Mapping[str, int], by_key: Mapping[str, list[Name]]
) -> StoredRecord:
    body, status = store.entries.read_body(record_parts(*name), *name, quiet=True)
    words = names_in(body.decode("ascii", "replace"))
    refers = sorted(other for word in words & by_key.keys() for other in by_key[word] if other != name)
    return StoredRecord(
        kind=name[0],
        key=name[1],
        size_bytes=status.st_size,
        blobs={digest: sizes[digest] for digest in sorted(words & sizes.keys())},
        records=tuple(refers),
        written_s=status.st_mtime,
        last_use_s=last_use(store.path, *name),
        is_signed=os.path.lexists(store.path.joinpath(*signature_parts(*name))),
    )


def close_over(
    stored: Mapping[Name, StoredRecord], start: Iterable[Name], but: Container[Name] = frozenset()
) -> set[Name]:
    """Return the records given and all that they refer to, however far, without those of `but`."""
    found: set[Name] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name not in found and name not in but and name in stored:
            found.add(name)
            waiting.extend(stored[name].records)
    return found


def measure(store: DiskStore) -> Statistics:
    """Count what the folder holds."""
    sizes = blob_sizes(store)
    stored = list_stored(store, blobs=sizes)
    kinds = sorted({record.kind for record in stored})
    return Statistics(
        path=str(store.path),
        format=FORMAT,
        records={kind: sum(record.kind == kind for record in stored) for kind in kinds},
        record_bytes=sum(record.size_bytes for record in stored),
        blobs=len(sizes),
        blob_bytes=sum(sizes.values()),
        unreferenced_blobs=len(sizes.keys() - {digest for record in stored for digest in record.blobs}),
        quarantined=len(list_folder(store.path, (QUARANTINE,))),
        being_written=len(list_folder(store.path, (STAGING,))),
    )


def find_record(store: DiskStore, key: str) -> Name:
    """Return the one record whose key is `key`, or begins with it; `kind/key` names one of two kinds."""
    kind, _, rest = key.rpartition("/")
    names = [name for name in list_names(store) if not kind or name[0] == kind]
    found = [name for name in names if name[1] == rest] or [name for name in names if name[1].startswith(rest)]
    if not found:
        raise ArtifactMissing(f"no record `{key}` is in store `{store.path}`", hint="`piecework store ls` lists them")
    if len(found) > 1:
        some = ", ".join(f"`{kind}/{name}`" for kind, name in found[:4])
        raise OptionError(f"`{key}` names {len(found)} records", hint=f"say more of it: {some}")
    return found[0]


def show(store: DiskStore, kind: str, key: str) -> dict[str, Any]:
    """Return a record with what the folder knows of it, as plain data."""
    known = list_stored(store)
    described = next((each for each in known if each.name == (kind, key)), None)
    if described is None:
        raise ArtifactMissing(f"no {kind} record `{key}` is in store `{store.path}`", facts={"kind": kind, "key": key})
    body, _ = store.entries.read_body(record_parts(kind, key), kind, key, quiet=True)
    return {
        "kind": kind,
        "key": key,
        "record": decode_record(kind, key, body),
        "bytes": {"record": described.size_bytes, "blobs": dict(described.blobs), "total": described.total_bytes},
        "refers_to": [list(name) for name in described.records],
        "referred_to_by": [list(each.name) for each in known if (kind, key) in each.records],
        "is_signed": described.is_signed,
        "written": _date(described.written_s),
        "last_use": _date(described.last_use_s),
    }


def _date(moment_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment_s))


def identity_of(store: DiskStore, kind: str, key: str) -> dict[str, Any]:
    """Return all that decides whether a record is found: its factors and, of a program, what its trace read."""
    record = store.read_record(kind, key)
    found = {**record.get("factors", {})}
    if kind == PROGRAM:
        evidence = json.loads(store.read_blob(record["evidence"]))
        found["trace"] = {
            "sources": {f"{each['package']}/{each['path']}": each["digest"] for each in record["sources"]},
            "functions": {f"{each['module']}.{each['qualname']}": each["digest"] for each in evidence["code"]},
            "values": {readable_source(each["source"]): each["value"] for each in evidence["facts"]},
            "operators": record.get("declarations", {}),
            "cpp_compiler": record.get("cpp_compiler", ""),
        }
    return found


def find_differences(first: Any, second: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return where two records differ, as (path, value of the first, value of the second); None where one lacks it."""
    inner: list[tuple[str, Any, Any]] = []
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in sorted({**first, **second}):
            inner.append((f"{path}.{name}" if path else name, first.get(name), second.get(name)))
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        inner = [(f"{path}[{index}]", a, b) for index, (a, b) in enumerate(zip(first, second, strict=True))]
    else:
        return [] if first == second else [(path, first, second)]
    return [found for name, a, b in inner for found in find_differences(a, b, name)]


def verify(store: DiskStore, *, repair: bool = False) -> list[Fault]:
    """Read every record and blob as a start would, and return what would not be loaded.

    `repair` moves damaged entries to quarantine, so that the next start makes them anew.
    """
    may_move = repair and not store.read_only
    entries = Entries(store.path, store.trust, store.checks, ignore, strict=not repair, may_move=may_move)
    entries.check_folder()
    reads: list[tuple[Parts, Callable[[], object]]] = []
    faults = []
    for kind, key in list_names(store):
        where = record_parts(kind, key)
        reads.append((where, partial(entries.read_record, where, kind, key, quiet=True)))
    for where, _ in list_entries(store.path, (BLOBS,), 1):
        if _is_blob(where):
            reads.append((where, partial(entries.read_blob, where, where[-1], is_own=True, quiet=True)))
        else:
            faults.append(Fault(str(store.path.joinpath(*where)), "it is no entry of a store"))
    for where, read in reads:
        try:
            read()
        except StoreError as error:
            reason = str(error.facts.get("reason", error.message))
            faults.append(Fault(str(store.path.joinpath(*where)), reason))
    return sorted(faults, key=lambda fault: fault.path)
