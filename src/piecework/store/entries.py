"""Reading the entries of a folder: trust, then length and digest, then the content; damage is told once a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from piecework.errors import ArtifactMissing, CorruptEntry, FormatTooNew, StoreError, StoreUnwritable, UntrustedArtifact
from piecework.events import Observer, StoreWarning
from piecework.store.envelope import (
    MAXIMUM_RECORD_BYTES,
    RECORD_WORD,
    STORE_WORD,
    Damaged,
    NewerFormat,
    decode_record,
    seal,
    unseal,
)
from piecework.store.files import Step, digest_of, open_file, publish, read_all, set_aside
from piecework.store.layout import FORMAT, MARKER, Parts, signature_parts
from piecework.store.protocol import Record, RecordCheck
from piecework.store.trust import Trust, fault_of, find_open_folder
from piecework.values.digest import digest_bytes

MAXIMUM_BLOB_BYTES = 8 << 30
LARGE_BYTES = 64 << 20  # from here on a blob is compared before it takes memory
FAULTS_OF_A_RECORD = (KeyError, TypeError, ValueError, IndexError, AttributeError)
MARKER_BODY = b"entries below this folder are described in docs/format.md of Piecework\n"


class Entries:
    """The verified view of one store's folder."""

    def __init__(
        self,
        root: Path,
        trust: Trust,
        checks: Mapping[str, RecordCheck],
        observer: Observer,
        strict: bool,
        *,
        may_move: bool,
    ) -> None:
        self.root = root
        self.trust = trust
        self.observer = observer
        self._checks = checks
        self._strict = strict
        self._may_move = may_move and not strict
        self._told: set[str] = set()
        self._vouched: set[str] = set()
        self._lock = Lock()
        self._is_checked = self._is_marked = False

    def read_blob(self, parts: Parts, digest: str, *, is_own: bool = False, quiet: bool = False) -> bytes:
        """Return a blob's bytes, verified."""
        if self.trust.needs_signature and not is_own and digest not in self._vouched:
            raise UntrustedArtifact(
                f"blob `{digest}` is not loaded: no signed record that was read refers to it",
                hint="blobs are loaded through their record; read it first",
                facts={"digest": digest},
            )
        data, status = self._read(parts, MAXIMUM_BLOB_BYTES, quiet, digest)
        if digest_bytes(data) != digest:
            self.reject(parts, f"its digest is not the one it is named by ({len(data)} bytes)", status)
        return data

    def read_record(
        self, parts: Parts, kind: str, key: str, *, own: str | None = None, quiet: bool = False
    ) -> tuple[dict[str, Any], int]:
        """Return a record, verified, trusted and checked, and its size; one whose body has the digest `own` is ours."""
        body, status = self.read_body(parts, kind, key, own=own, quiet=quiet)
        try:
            record = decode_record(kind, key, body)
            self.check(kind, key, record)
        except Damaged as error:
            self.reject(parts, str(error), status)
        return record, status.st_size

    def read_body(
        self, parts: Parts, kind: str, key: str, *, own: str | None = None, quiet: bool = False
    ) -> tuple[bytes, os.stat_result]:
        """Return a record's body, verified and trusted but not read yet, and the file's status."""
        data, status = self._read(parts, MAXIMUM_RECORD_BYTES, quiet)
        try:
            body = unseal(RECORD_WORD, data)
        except NewerFormat as error:
            raise self._too_new(parts, error) from None
        except Damaged as error:
            self.reject(parts, str(error), status)
        if own is None or digest_bytes(body) != own:
            signatures = self.read_signatures(kind, key) if self.trust.needs_signature else None
            self.vouch(kind, key, body, signatures)
        return body, status

    def vouch(self, kind: str, key: str, body: bytes, signatures: bytes | None) -> None:
        """Let policy judge a record that comes from elsewhere; the blobs that its signer vouched for may be read."""
        self._vouched |= self.trust.check_record(kind, key, body, signatures)

    def check(self, kind: str, key: str, record: Record) -> None:
        """Raise `Damaged` where a record lacks what those of its kind have."""
        check = self._checks.get(kind)
        if check is None:
            return
        try:
            fault = check(key, record)
        except FAULTS_OF_A_RECORD as error:
            fault = f"it lacks what {kind} records have ({type(error).__name__}: {error})"
        if fault:
            raise Damaged(fault)

    def _read(self, parts: Parts, limit: int, quiet: bool, digest: str = "") -> tuple[bytes, os.stat_result]:
        self.check_folder()
        status: os.stat_result | None = None
        try:
            with open_file(self.root, parts, quiet=quiet, see=self.trust.check_file) as (descriptor, status):
                self.trust.check_file(self.root.joinpath(*parts), status)
                if status.st_size > limit:
                    raise Damaged(f"it is {status.st_size} bytes long, of {limit} at most")
                if digest and status.st_size > LARGE_BYTES and digest_of(descriptor) != digest:
                    raise Damaged(f"its digest is not the one it is named by ({status.st_size} bytes)")
                return read_all(descriptor, status.st_size), status
        except FileNotFoundError:
            raise ArtifactMissing(f"`{parts[-1]}` is not in store `{self.root}`", facts={"path": parts[-1]}) from None
        except Damaged as error:
            self.reject(parts, str(error), status)
        except OSError as error:  # no fault of the entry: no descriptors left, no memory
            raise StoreError(
                f"`{self.root.joinpath(*parts)}` cannot be read: {error.strerror}",
                hint="the entry itself was not looked at; see what the system lacks",
            ) from error

    def read_signatures(self, kind: str, key: str) -> bytes | None:
        """Return the signatures that lie beside a record, as they are; None where there are none."""
        try:
            with open_file(self.root, signature_parts(kind, key), quiet=True) as (descriptor, status):
                return read_all(descriptor, min(status.st_size, 1 << 20))
        except (FileNotFoundError, Damaged):
            return None

    def is_same(self, parts: Parts, data: bytes) -> bool:
        """Tell whether an entry holds `data` already, which then counts as written now; damage is moved aside."""
        self.check_folder()
        try:
            with open_file(self.root, parts, quiet=True, see=self.trust.check_file) as (descriptor, status):
                self.trust.check_file(self.root.joinpath(*parts), status)
                if status.st_size == len(data) and read_all(descriptor, status.st_size) == data:
                    with suppress(OSError):  # so that a collector at work does not take it for an old one
                        os.utime(descriptor)
                    return True
        except FileNotFoundError:
            return False
        except (Damaged, UntrustedArtifact) as error:
            self.warn(self.root.joinpath(*parts), f"{error}; it is replaced")
            set_aside(self.root, parts)
        return False

    def reject(self, parts: Parts, reason: str, seen: os.stat_result | None) -> NoReturn:
        """Tell of a damaged entry once, move it to quarantine, and raise a miss (`strict`: an error)."""
        path = self.root.joinpath(*parts)
        self.put_aside(parts, f"{reason}; it was not read, and", seen)
        error: type[StoreError] = CorruptEntry if self._strict else ArtifactMissing
        raise error(
            f"`{path}` is damaged: {reason}",
            hint="it is written anew when it is next made; `piecework store verify` lists every damaged entry",
            facts={"path": str(path), "reason": reason, "damaged": True},
        )

    def put_aside(self, parts: Parts, what: str, seen: os.stat_result | None = None) -> None:
        """Move an entry to quarantine where that may be done, and tell of it once."""
        moved = False
        if self._may_move:
            with suppress(OSError):
                moved = set_aside(self.root, parts, seen)
        where = "is in quarantine" if moved else "lies where it was"
        self.warn(self.root.joinpath(*parts), f"{what} {where}", is_rejected=True)

    def hidden(self, what: str) -> ArtifactMissing:
        """Return the error of an entry that is not looked at."""
        return ArtifactMissing(f"no {what} is read from `{self.root}`: the store was opened write-only")

    def go_on_from_memory(self, error: OSError) -> None:
        """Tell once that the folder takes no writes; an error where that is asked for."""
        if self._strict:
            raise self.unwritable(error) from error
        self.warn(self.root, f"it takes no writes ({error.strerror}); what is not stored runs from memory")

    def unwritable(self, error: OSError) -> StoreUnwritable:
        """Return the error of a folder that takes no writes."""
        return StoreUnwritable(
            f"store `{self.root}` takes no writes: {error.strerror}",
            hint="make room or allow writing, give another folder with `--store DIR`, or keep nothing (`memory`)",
            facts={"path": str(self.root), "errno": error.errno},
        )

    def warn(self, path: Path, reason: str, *, is_rejected: bool = False) -> None:
        """Tell of something at a path, once for each path."""
        with self._lock:
            if str(path) in self._told:
                return
            self._told.add(str(path))
        self.observer(StoreWarning(path=str(path), reason=reason, is_rejected=is_rejected))

    # The folder as a whole

    def check_folder(self) -> None:
        """Raise unless the folder is trusted and of a format that this release knows; looked at once."""
        if self._is_checked:
            return
        there = next((path for path in (self.root, *self.root.parents) if os.path.lexists(path)), self.root)
        if os.path.lexists(there) and not there.is_dir():
            where = "" if there == self.root else f" lies under `{there}`, which"
            raise StoreUnwritable(
                f"store `{self.root}`{where} is not a folder",
                hint="give a folder, which is made where there is none: `--store DIR`",
            )
        self.trust.check_folder(self.root)
        try:
            with open_file(self.root, MARKER) as (descriptor, status):
                unseal(STORE_WORD, read_all(descriptor, min(status.st_size, 4096)))
            self._is_marked = True
        except FileNotFoundError:
            pass
        except NewerFormat as error:
            raise self._too_new(MARKER, error) from None
        except Damaged as error:
            self.warn(self.root / MARKER[0], f"{error}; the marker is written anew by the next write")
        self._is_checked = self.root.is_dir()

    def prepare(self, step: Step) -> None:
        """Make the folder ready for writing: checked, made, and marked with its format."""
        self.check_folder()
        if not (self._is_marked and os.path.lexists(self.root / MARKER[0])):
            publish(self.root, MARKER, seal(STORE_WORD, MARKER_BODY), step)
            self._is_marked = True

    def is_private(self, parts: Parts) -> bool:
        """Tell whether nobody but this user and root can change what lies at a place of the store."""
        inner = (self.root.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))
        return self._is_private_root and not any(fault_of(path, os.geteuid(), is_root=True) for path in inner)

    @cached_property
    def _is_private_root(self) -> bool:
        return find_open_folder(self.root, os.geteuid()) is None

    def _too_new(self, parts: Parts, error: NewerFormat) -> FormatTooNew:
        return FormatTooNew(
            f"`{self.root.joinpath(*parts)}` has format {error.version}; this release reads format {FORMAT}",
            hint="upgrade Piecework, or give this release a folder of its own with `--store DIR`",
            facts={"path": str(self.root.joinpath(*parts)), "format": error.version, "known": FORMAT},
        )
