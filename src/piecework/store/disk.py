"""A store in a folder: each read verified, each write atomic, nothing written by who only reads.

An entry that is damaged is a miss with one warning that names the file; it is moved to quarantine, and the next write
puts a whole one in its place. A folder that takes no writes costs one warning, and the run goes on from memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from piecework.errors import ArtifactMissing, StoreUnwritable
from piecework.events import Observer, StoreRead, StoreWrite, ignore
from piecework.store.entries import Entries
from piecework.store.envelope import RECORD_WORD, encode_record, seal
from piecework.store.files import Step, last_use, list_folder, no_step, publish, remove, remove_notes
from piecework.store.flight import Hold, fly_once, hold_entry
from piecework.store.kernels import MemoryKernels, check_executable
from piecework.store.layout import (
    RECORD_SUFFIX,
    RECORDS,
    blob_parts,
    digests_in,
    fan_out,
    is_key,
    kind_parts,
    record_parts,
    signature_parts,
    store_path,
    use_parts,
)
from piecework.store.memory import MemoryStore
from piecework.store.protocol import DISK, MEMORY, Flight, RecordCheck, never_done
from piecework.store.trust import ANY, OwnFiles, Trust
from piecework.values.digest import digest_bytes

DAY_S = 86400.0


class DiskStore:
    """Keep blobs and records in a folder that processes, users and releases may share.

    `read_only` keeps what is written in memory; `write_only` reads nothing but what this object wrote; `strict` turns
    a damaged entry and an unwritable folder into errors; `trust` says whose entries are loaded; `checks` hold what a
    record of each kind must have; `record_uses` notes the use of a record, once a day at most, in a file of its own
    where the filesystem keeps no times of access (`noatime`); `on_step` is called before every step of a write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        write_only: bool = False,
        strict: bool = False,
        trust: Trust | None = None,
        checks: Mapping[str, RecordCheck] | None = None,
        observer: Observer = ignore,
        record_uses: bool = False,
        on_step: Step = no_step,
    ) -> None:
        self.path = store_path(path)
        self.read_only = read_only
        self.write_only = write_only
        self.strict = strict
        self.trust = trust or OwnFiles()
        self.observer = observer
        self.record_uses = record_uses
        self._on_step = on_step
        self.checks = dict(checks or {})
        self.entries = Entries(self.path, self.trust, self.checks, observer, strict, may_move=not read_only)
        self._memory = MemoryStore()
        self._kernels = MemoryKernels()
        # What this object wrote, and the digest of it: its own work needs no signature.
        self._written: dict[str | tuple[str, str], str] = {}

    def __repr__(self) -> str:
        return f"DiskStore({str(self.path)!r})"

    @property
    def kept_in_memory(self) -> int:
        """Return how many blobs and records live in this process alone: read-only, or refused by the folder."""
        return len(self._memory)

    # Blobs

    def read_blob(self, digest: str) -> bytes:
        start_ns, parts = time.perf_counter_ns(), blob_parts(digest, ArtifactMissing)
        if self._memory.has_blob(digest):
            data = self._memory.read_blob(digest)
        elif self._is_hidden(digest):
            raise self.entries.hidden(f"blob `{digest}`")
        else:
            data = self.entries.read_blob(parts, digest, is_own=digest in self._written)
        self.observer(StoreRead(kind="blob", name=digest, size_bytes=len(data), start_ns=start_ns))
        return data

    def has_blob(self, digest: str) -> bool:
        try:
            parts = blob_parts(digest, ArtifactMissing)
            if self._memory.has_blob(digest):
                return True
            if self._is_hidden(digest):
                return False
            self.entries.read_blob(parts, digest, is_own=digest in self._written)
        except ArtifactMissing:
            return False
        return True

    def write_blob(self, data: bytes) -> str:
        start_ns, digest = time.perf_counter_ns(), digest_bytes(data)
        if self.read_only:
            return self._memory.write_blob(data)
        parts = blob_parts(digest)
        try:
            if not self.entries.is_same(parts, data):
                self._publish(parts, data)
                self.observer(StoreWrite(kind="blob", name=digest, size_bytes=len(data), start_ns=start_ns))
        except OSError as error:
            self.entries.go_on_from_memory(error)
            return self._memory.write_blob(data)
        self._written[digest] = digest
        return digest

    def kernel_path(self, digest: str) -> Path:
        """Return a path under which the verified bytes of `digest` can be opened by `dlopen`, for this process's life.

        It is the blob itself, unless another user could change it after it was verified.
        """
        data = self.read_blob(digest)
        parts = blob_parts(digest)
        if self._memory.has_blob(digest) or not self.entries.is_private(parts):
            return self._kernels.path_of(digest, data)
        path = self.path.joinpath(*parts)
        check_executable(path)
        return path

    # Records

    def read_record(self, kind: str, key: str) -> dict[str, Any]:
        start_ns, parts = time.perf_counter_ns(), record_parts(kind, key, ArtifactMissing)
        if self._memory.has_record(kind, key):
            return self._memory.read_record(kind, key)
        if self._is_hidden((kind, key)):
            raise self.entries.hidden(f"{kind} record `{key}`")
        record, size = self.entries.read_record(parts, kind, key, own=self._written.get((kind, key)))
        self.observer(StoreRead(kind=kind, name=key, size_bytes=size, start_ns=start_ns))
        if self.record_uses and not self.read_only:
            self.note_use(kind, key)
        return record

    def has_record(self, kind: str, key: str) -> bool:
        """Tell whether a record is here, whole and trusted; nothing is counted as read."""
        try:
            parts = record_parts(kind, key, ArtifactMissing)
            if self._memory.has_record(kind, key):
                return True
            if self._is_hidden((kind, key)):
                return False
            self.entries.read_record(parts, kind, key, own=self._written.get((kind, key)))
        except ArtifactMissing:
            return False
        return True

    def layer_of(self, kind: str, key: str) -> str:
        """Tell whether a record is on the disk or in this process alone."""
        return MEMORY if self._memory.has_record(kind, key) else DISK

    def write_record(self, kind: str, key: str, record: Mapping[str, Any]) -> None:
        start_ns = time.perf_counter_ns()
        parts, body = record_parts(kind, key), encode_record(kind, key, record)
        # A record on disk must not refer to blobs that only this process has.
        if self.read_only or any(self._memory.has_blob(digest) for digest in digests_in(body.decode())):
            self._memory.write_record(kind, key, record)
            return
        data = seal(RECORD_WORD, body)
        try:
            if not self.entries.is_same(parts, data):
                remove(self.path, signature_parts(kind, key))
                self._publish(parts, data)
                self.observer(StoreWrite(kind=kind, name=key, size_bytes=len(data), start_ns=start_ns))
        except OSError as error:
            self.entries.go_on_from_memory(error)
            self._memory.write_record(kind, key, record)
            return
        self._memory.delete_record(kind, key)
        self._written[kind, key] = digest_bytes(body)

    def adopt(self, kind: str, key: str, record: Mapping[str, Any], signatures: bytes | None) -> None:
        """Keep a record that was verified and trusted elsewhere, with its signatures."""
        self.write_record(kind, key, record)
        if signatures is not None and not self._memory.has_record(kind, key):
            with suppress(OSError):
                publish(self.path, signature_parts(kind, key), signatures)

    def more_records(self, kind: str, group: str) -> list[str]:
        """Return nothing: no layer lies behind the folder."""
        return []

    def list_records(self, kind: str, group: str = "") -> list[str]:
        parts, prefix = kind_parts(kind), f"{group}." if group else ""
        self.entries.check_folder()
        folders = [fan_out(group)] if len(group) > 1 else list_folder(self.path, parts)
        names = (name for folder in folders for name in list_folder(self.path, (*parts, folder)))
        keys = {name.removesuffix(RECORD_SUFFIX) for name in names if name.endswith(RECORD_SUFFIX)}
        found = {k for k in keys if is_key(k) and k.startswith(prefix) and not self._is_hidden((kind, k))}
        return sorted(found | set(self._memory.list_records(kind, group)))

    def delete_record(self, kind: str, key: str) -> None:
        parts = record_parts(kind, key)
        self._memory.delete_record(kind, key)
        self._written.pop((kind, key), None)
        if self.read_only:
            return
        try:
            for each in (parts, signature_parts(kind, key), use_parts(kind, key)):
                remove(self.path, each)
            remove_notes(self.path, kind, key)
        except OSError as error:
            self.entries.go_on_from_memory(error)

    @property
    def is_vouched_for(self) -> bool:
        """Whether records are this user's own, or signed; under `any` their digests are right, and that is all."""
        return self.trust.name != ANY

    def set_aside(self, kind: str, key: str, reason: str) -> None:
        """Move a record that was found to be wrong to quarantine, so that it is made anew."""
        self._memory.delete_record(kind, key)
        self._written.pop((kind, key), None)
        self.entries.put_aside(record_parts(kind, key), f"{reason}; it is not served, and")

    # Between processes

    def fillable(self) -> DiskStore | None:
        """Return this store where another process can fill the folder and be believed: what it writes is not signed."""
        return None if self.read_only or self.write_only or self.trust.needs_signature else self

    def write_back(self, key: str) -> None:
        """Do nothing: the folder is where programs are written to."""

    @contextmanager
    def single_flight(
        self, name: str, is_done: Callable[[], bool] = never_done, timeout_s: float = 600.0
    ) -> Iterator[Flight]:
        """Enter with the right to do the work called `name`, or after another process of this host has done it.

        Where `owned` is false, `is_done` held: read what the other process wrote. It is asked whenever the right falls
        to this process, so that what was finished between a look and the asking is not done again.
        """
        with ExitStack() as stack:
            flight = Flight(owned=True, exclusive=False, waited_s=0.0)
            try:
                if not self.read_only:
                    self.entries.check_folder()
                    flight = stack.enter_context(fly_once(self.path, name, is_done, timeout_s))
            except OSError as error:
                self.entries.warn(self.path, f"`{name}` is not kept to one process ({error.strerror or error})")
            if not flight.exclusive:
                flight = Flight(owned=not is_done(), exclusive=False, waited_s=0.0)
            yield flight

    def hold(self, kind: str, key: str) -> Hold:
        """Keep a record, and all it refers to, from being evicted until the hold is closed or this process ends."""
        return hold_entry(self.path, record_parts(kind, key))

    def note_use(self, kind: str, key: str) -> None:
        """Note that a record was used now, unless its times tell it to the day; nothing where none can be written."""
        with suppress(OSError):
            if time.time() - last_use(self.path, kind, key) > DAY_S:
                publish(self.path, use_parts(kind, key), b"")

    def check_writable(self) -> None:
        """Raise `StoreUnwritable` unless the folder takes writes: for work whose only purpose is to fill it."""
        if self.read_only:
            raise StoreUnwritable(f"store `{self.path}` was opened read-only", hint="leave out `--store-read-only`")
        try:
            self.entries.prepare(self._on_step)
            publish(self.path, ("staging", "probe"), b"")
            remove(self.path, ("staging", "probe"))
        except OSError as error:
            raise self.entries.unwritable(error) from error

    def _publish(self, parts: tuple[str, ...], data: bytes) -> None:
        for attempt in range(3):
            try:
                self.entries.prepare(self._on_step)
                publish(self.path, parts, data, self._on_step, sync_folder=parts[0] == RECORDS)
            except FileNotFoundError:  # the folder was deleted under this write: make it again
                if attempt == 2:
                    raise
            else:
                return

    def _is_hidden(self, name: str | tuple[str, str]) -> bool:
        return self.write_only and name not in self._written
