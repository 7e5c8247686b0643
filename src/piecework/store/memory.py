"""A store in this process's memory: the same path through `bind` without a disk.

Records are kept as the text they would have on disk, so that what cannot be stored there fails here as well, and no
caller can change what another one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from piecework.errors import ArtifactMissing
from piecework.events import Observer, StoreRead, StoreWrite, ignore
from piecework.store.envelope import decode_record, encode_record
from piecework.store.kernels import MemoryKernels
from piecework.store.layout import blob_parts, record_parts
from piecework.store.protocol import MEMORY, Flight, never_done
from piecework.values.digest import digest_bytes


class MemoryStore:
    """Keep blobs and records for as long as the object lives."""

    def __init__(self, *, observer: Observer = ignore) -> None:
        self.observer = observer
        self._blobs: dict[str, bytes] = {}
        self._records: dict[tuple[str, str], bytes] = {}
        self._kernels = MemoryKernels()
        self._lock = Lock()
        self._flights: dict[str, Lock] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._records)} records, {len(self._blobs)} blobs)"

    def __len__(self) -> int:
        return len(self._records) + len(self._blobs)

    def __bool__(self) -> bool:
        return True

    def read_blob(self, digest: str) -> bytes:
        blob_parts(digest, ArtifactMissing)
        data = self._blobs.get(digest)
        if data is None:
            raise ArtifactMissing(f"no blob `{digest}` is stored", facts={"digest": digest})
        self.observer(StoreRead(kind="blob", name=digest, size_bytes=len(data)))
        return data

    def write_blob(self, data: bytes) -> str:
        digest = digest_bytes(data)
        if digest not in self._blobs:
            self._blobs[digest] = bytes(data)
            self.observer(StoreWrite(kind="blob", name=digest, size_bytes=len(data)))
        return digest

    def has_blob(self, digest: str) -> bool:
        return digest in self._blobs

    def kernel_path(self, digest: str) -> Path:
        return self._kernels.path_of(digest, self.read_blob(digest))

    def read_record(self, kind: str, key: str) -> dict[str, Any]:
        record_parts(kind, key, ArtifactMissing)
        body = self._records.get((kind, key))
        if body is None:
            raise ArtifactMissing(f"no {kind} record `{key}` is stored", facts={"kind": kind, "key": key})
        self.observer(StoreRead(kind=kind, name=key, size_bytes=len(body)))
        return decode_record(kind, key, body)

    def write_record(self, kind: str, key: str, record: Mapping[str, Any]) -> None:
        record_parts(kind, key)
        body = encode_record(kind, key, record)
        self._records[kind, key] = body
        self.observer(StoreWrite(kind=kind, name=key, size_bytes=len(body)))

    def has_record(self, kind: str, key: str) -> bool:
        """Tell whether a record is kept here."""
        return (kind, key) in self._records

    def layer_of(self, kind: str, key: str) -> str:
        """Return the name of the one layer there is."""
        return MEMORY

    def more_records(self, kind: str, group: str) -> list[str]:
        """Return nothing: no layer lies behind the memory."""
        return []

    def list_records(self, kind: str, group: str = "") -> list[str]:
        prefix = f"{group}." if group else ""
        return sorted(key for of_kind, key in list(self._records) if of_kind == kind and key.startswith(prefix))

    def delete_record(self, kind: str, key: str) -> None:
        record_parts(kind, key)
        self._records.pop((kind, key), None)

    @property
    def is_vouched_for(self) -> bool:
        """Whether records can be believed: this process wrote them."""
        return True

    def set_aside(self, kind: str, key: str, reason: str) -> None:
        """Forget a record that was found to be wrong."""
        self.delete_record(kind, key)

    def fillable(self) -> None:
        """Return None: no other process sees this memory."""

    def write_back(self, key: str) -> None:
        """Do nothing: no layer lies behind the memory."""

    @contextmanager
    def single_flight(
        self, name: str, is_done: Callable[[], bool] = never_done, timeout_s: float = 600.0
    ) -> Iterator[Flight]:
        """Enter with the right to do the work called `name` once among this process's threads."""
        with self._lock:
            lock = self._flights.setdefault(name, Lock())
        waited = not lock.acquire(blocking=False)
        exclusive = not waited or lock.acquire(timeout=timeout_s)
        try:
            yield Flight(owned=not is_done(), exclusive=exclusive, waited_s=0.0)
        finally:
            if exclusive:
                lock.release()

    @contextmanager
    def hold(self, kind: str, key: str) -> Iterator[None]:
        """Keep a record from being evicted; nothing is evicted here."""
        yield
