"""A folder with a remote behind it: read through it with verification, written back to it in the background.

What the folder lacks is asked of the remote, compared like any entry, and kept in the folder; a program's record brings
all that it refers to in three rounds. Whom to believe is the folder's policy, and `own` cannot be kept here: nobody can
tell who wrote an object. Under `signed` nothing is written back, for what is made here is not signed.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path
from typing import Any

from piecework.errors import ArtifactMissing, OptionError
from piecework.events import Observer, StoreRead, StoreWarning, ignore
from piecework.store.disk import DiskStore
from piecework.store.entries import MAXIMUM_BLOB_BYTES
from piecework.store.envelope import (
    MAXIMUM_RECORD_BYTES,
    RECORD_WORD,
    Damaged,
    NewerFormat,
    decode_record,
    encode_record,
    seal,
    unseal,
)
from piecework.store.layout import (
    RECORD_SUFFIX,
    blob_parts,
    fan_out,
    record_parts,
    signature_parts,
)
from piecework.store.link import Link
from piecework.store.protocol import ARTIFACT, PROGRAM, REMOTE, Flight, never_done
from piecework.store.references import Name, artifacts_of, blobs_of, is_name
from piecework.store.trust import OWN
from piecework.values.digest import digest_bytes

INDEX, INDEX_WORD = "INDEX", "piecework-index"
FLUSH_S = 10.0
ABSENT_S = 60.0


class RemoteStore:
    """Read through a folder to a remote, and write what is made here back to it unless `write_back` is false."""

    def __init__(
        self,
        local: DiskStore,
        link: Link,
        *,
        observer: Observer = ignore,
        write_back: bool = True,
        absent_s: float = ABSENT_S,
    ) -> None:
        if local.trust.name == OWN:
            raise OptionError(
                f"trust `own` cannot be kept with `{link.url}`: nobody can tell who wrote an object there",
                hint="`--trust signed` with the keys of those who fill it, or `--trust any` if they may all run code "
                "here; `piecework store push` needs neither",
            )
        self.local, self.link, self.observer, self.absent_s = local, link, observer, absent_s
        self.writes_back = write_back and not (local.read_only or link.is_read_only or local.trust.needs_signature)
        self._absent: dict[str, float] = {}  # until when an object is not asked for again
        self._fetched: set[Name] = set()
        self._index: list[Name] = []
        if self.writes_back:
            atexit.register(self.flush)

    def __repr__(self) -> str:
        return f"RemoteStore({self.link.url!r}, {self.local!r})"

    def __bool__(self) -> bool:
        return True

    # Blobs

    def read_blob(self, digest: str) -> bytes:
        try:
            return self.local.read_blob(digest)
        except ArtifactMissing:
            if not self._bring_blobs([digest]):
                raise
        return self.local.read_blob(digest)

    def has_blob(self, digest: str) -> bool:
        return self.local.has_blob(digest) or bool(self._bring_blobs([digest]))

    def write_blob(self, data: bytes) -> str:
        digest = self.local.write_blob(data)
        self._absent.pop("/".join(blob_parts(digest)), None)
        if self.writes_back:
            self.link.put_later("/".join(blob_parts(digest)), bytes(data))
        return digest

    def kernel_path(self, digest: str) -> Path:
        self.has_blob(digest)
        return self.local.kernel_path(digest)

    def _bring_blobs(self, digests: Iterable[str]) -> int:
        """Bring blobs from the remote into the folder; return how many came whole."""
        paths = {"/".join(blob_parts(digest)): digest for digest in digests}
        found = self._fetch(paths, MAXIMUM_BLOB_BYTES)
        whole = 0
        for path, data in found.items():
            if digest_bytes(data) != paths[path]:
                self._warn(path, "its digest is not the one it is named by; it was not read")
                self._absent[path] = inf
                continue
            self.local.write_blob(data)
            self.observer(StoreRead(kind="blob", name=paths[path], size_bytes=len(data)))
            whole += 1
        return whole

    # Records

    def read_record(self, kind: str, key: str) -> dict[str, Any]:
        try:
            return self.local.read_record(kind, key)
        except ArtifactMissing as error:
            brought = self._bring_records([(kind, key)])
            if not brought:
                raise error from None
        record = brought[kind, key]
        if kind == PROGRAM:
            self._bring_all(record)
        return record

    def write_record(self, kind: str, key: str, record: Mapping[str, Any]) -> None:
        self.local.write_record(kind, key, record)
        self._absent.pop("/".join(record_parts(kind, key)), None)
        if self.writes_back:
            self._put_record((kind, key), record)

    def layer_of(self, kind: str, key: str) -> str:
        """Tell whether a record came from the remote in this process, or was here."""
        return REMOTE if (kind, key) in self._fetched else self.local.layer_of(kind, key)

    def list_records(self, kind: str, group: str = "") -> list[str]:
        return self.local.list_records(kind, group)

    def more_records(self, kind: str, group: str) -> list[str]:
        """Return the keys of a group that the remote has and the folder has not."""
        known = set(self.local.list_records(kind, group))
        folder = f"records/{kind}/{fan_out(group)}/"
        listed = self.link.list(folder)
        if listed is None:
            keys = {key for of, key in self.read_index() if of == kind}
        else:
            files = {path.rpartition("/")[2] for path in listed if path.endswith(RECORD_SUFFIX)}
            keys = {file.removesuffix(RECORD_SUFFIX) for file in files}
        return sorted(key for key in keys - known if key.startswith(f"{group}.") and is_name(kind, key))

    def read_index(self) -> list[Name]:
        """Return the records that the remote's index names: for a remote that cannot be listed."""
        data = self._fetch([INDEX], MAXIMUM_RECORD_BYTES).get(INDEX)
        if data is not None:
            try:
                self._index = [(str(kind), str(key)) for kind, key in json.loads(unseal(INDEX_WORD, data))]
            except (Damaged, NewerFormat, ValueError, TypeError) as error:
                self._warn(INDEX, f"{error}; it was not read")
                self._absent[INDEX] = inf
            else:
                self._absent[INDEX] = time.monotonic() + self.absent_s
        return self._index

    def delete_record(self, kind: str, key: str) -> None:
        self.local.delete_record(kind, key)

    @property
    def is_vouched_for(self) -> bool:
        """Whether records are read only with a signature over them."""
        return self.local.is_vouched_for

    def set_aside(self, kind: str, key: str, reason: str) -> None:
        """Move a wrong record to the folder's quarantine; this process does not ask the remote for it again."""
        self.local.set_aside(kind, key, reason)
        self._absent["/".join(record_parts(kind, key))] = inf

    def _bring_all(self, record: Mapping[str, Any]) -> None:
        """Bring all that a program refers to side by side: its artifacts' records, then every blob."""
        lacking = [name for name in artifacts_of(record) if not self.local.has_record(*name)]
        wanted = blobs_of(PROGRAM, record)
        for found in self._bring_records(lacking).values():
            wanted |= blobs_of(ARTIFACT, found)
        self._bring_blobs(digest for digest in sorted(wanted) if not self.local.has_blob(digest))

    def _bring_records(self, names: Iterable[Name]) -> dict[Name, dict[str, Any]]:
        """Bring records from the remote into the folder, each verified and trusted; return those that came whole."""
        places = {"/".join(record_parts(*name)): name for name in names if is_name(*name)}
        signed = self.local.trust.needs_signature
        beside = {path: "/".join(signature_parts(*name)) for path, name in places.items()} if signed else {}
        found = self._fetch([*places, *beside.values()], MAXIMUM_RECORD_BYTES)
        brought = {}
        for path, (kind, key) in places.items():
            data = found.get(path)
            if data is None:
                continue
            signatures = found.get(beside.get(path, ""))
            try:
                body = unseal(RECORD_WORD, data)
                self.local.entries.vouch(kind, key, body, signatures)
                record = decode_record(kind, key, body)
                self.local.entries.check(kind, key, record)
            except (Damaged, NewerFormat) as error:
                self._warn(path, f"{error}; it was not read")
                self._absent[path] = inf
                continue
            self.local.adopt(kind, key, record, signatures)
            self.observer(StoreRead(kind=kind, name=key, size_bytes=len(data)))
            self._fetched.add((kind, key))
            brought[kind, key] = record
        return brought

    def _fetch(self, paths: Iterable[str], limit: int) -> dict[str, bytes]:
        """Return what the remote has of `paths`; what it does not have is not asked for again for a minute."""
        if self.local.write_only:
            return {}
        now = time.monotonic()
        wanted = [path for path in paths if self._absent.get(path, 0.0) <= now]
        found = self.link.fetch(wanted, limit) if wanted else {}
        if not self.link.is_resting:
            self._absent |= {path: now + self.absent_s for path, data in found.items() if data is None}
        return {path: data for path, data in found.items() if data is not None}

    # Between processes

    def single_flight(
        self, name: str, is_done: Callable[[], bool] = never_done, timeout_s: float = 600.0
    ) -> AbstractContextManager[Flight]:
        """Enter with the right to do the work once among the processes of this host."""
        return self.local.single_flight(name, is_done, timeout_s)

    def hold(self, kind: str, key: str) -> AbstractContextManager[object]:
        """Keep a record from being evicted from the folder."""
        return self.local.hold(kind, key)

    def fillable(self) -> DiskStore | None:
        """Return the folder, where another process can fill it."""
        return self.local.fillable()

    def write_back(self, key: str) -> None:
        """Have a program that another process put into the folder written to the remote, with all that it reads."""
        if not self.writes_back:
            return
        program = self.local.read_record(PROGRAM, key)
        for other in program.get("siblings", ()):
            self.write_back(other)
        records = [(name, self.local.read_record(*name)) for name in artifacts_of(program)]
        records.append(((PROGRAM, key), program))
        for digest in sorted(set().union(*(blobs_of(kind, record) for (kind, _), record in records))):
            self.link.put_later("/".join(blob_parts(digest)), self.local.read_blob(digest))
        for name, record in records:
            self._put_record(name, record)

    def _put_record(self, name: Name, record: Mapping[str, Any]) -> None:
        self.link.put_later("/".join(record_parts(*name)), seal(RECORD_WORD, encode_record(*name, record)))

    def flush(self, timeout_s: float = FLUSH_S) -> int:
        """Wait for what is being written back, for so long at most; return how many objects are not written."""
        return self.link.flush(timeout_s)

    def _warn(self, path: str, reason: str) -> None:
        self.observer(StoreWarning(path=f"{self.link.url}/{path}", reason=reason))
