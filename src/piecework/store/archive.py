"""A store in one file, for an image layer or an init container: a tar that is the same for the same entries.

Its first member lists the others with their lengths and digests. Unpacked into a folder it is a store; read back by
`import_archive`, each byte is compared before one is written. Only what `export_archive` writes is read: each header is
compared with the one it would have written, so that no link, path or odd type of member is ever interpreted.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from piecework.errors import ArtifactMissing, CorruptEntry, FormatTooNew, OptionError, StoreError, StoreUnwritable
from piecework.store.disk import DiskStore
from piecework.store.entries import MARKER_BODY, MAXIMUM_BLOB_BYTES
from piecework.store.envelope import RECORD_WORD, STORE_WORD, Damaged, NewerFormat, decode_record, seal, unseal
from piecework.store.files import READ_FLAGS, publish
from piecework.store.inventory import Name, close_over, list_stored
from piecework.store.layout import (
    BLOBS,
    MARKER,
    RECORD_SUFFIX,
    RECORDS,
    SIGNATURE_SUFFIX,
    SIGNATURES,
    Parts,
    blob_parts,
    record_parts,
    signature_parts,
)
from piecework.values.digest import canonical_json, digest_bytes

ARCHIVE_WORD = "piecework-archive"
INDEX = "ARCHIVE"
BLOCK = 512
MAXIMUM_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Archived:
    """What went into an archive, or came out of one."""

    records: tuple[Name, ...]
    blobs: int
    size_bytes: int


@dataclass(frozen=True)
class Member:
    """One entry of an archive: where it lies in a store, its length and its digest."""

    parts: Parts
    length: int
    digest: str

    @property
    def name(self) -> str:
        return "/".join(self.parts)


def export_archive(store: DiskStore, file: Path, keep: Iterable[Name] | None = None) -> Archived:
    """Write records (all, or those of `keep`) and whatever they refer to into one file, replacing it whole."""
    file = Path(os.path.realpath(file))  # what a link names is written, the link stays
    if os.path.lexists(file) and not (file.is_file() or file.is_dir()):  # it would be replaced: a pipe, /dev/stdout
        raise OptionError(f"`{file}` is no plain file", hint="name a new file, in whose place it can be put")
    stored = {record.name: record for record in list_stored(store)}
    chosen = list(stored if keep is None else keep)
    for kind, key in chosen:
        if (kind, key) not in stored:
            raise ArtifactMissing(f"no {kind} record `{key}` can be exported", hint="`piecework store ls` lists them")
    wanted = close_over(stored, chosen)
    members = [(MARKER, seal(STORE_WORD, MARKER_BODY))]
    digests = sorted({digest for name in wanted for digest in stored[name].blobs})
    signatures = [(signature_parts(*name), store.entries.read_signatures(*name)) for name in sorted(wanted)]
    members += [(parts, data) for parts, data in signatures if data is not None]
    for name in sorted(wanted):
        body, _ = store.entries.read_body(record_parts(*name), *name, quiet=True)
        members.append((record_parts(*name), seal(RECORD_WORD, body)))
    index = [Member(blob_parts(d), max(stored[n].blobs.get(d, 0) for n in wanted), d) for d in digests]
    index += [Member(parts, len(data), digest_bytes(data)) for parts, data in members]
    head = seal(ARCHIVE_WORD, canonical_json([[each.name, each.length, each.digest] for each in index]).encode())
    size = _write_whole(file, head, index, store, dict(members))
    return Archived(tuple(sorted(wanted)), len(digests), size)


def _write_whole(file: Path, head: bytes, index: list[Member], store: DiskStore, data: dict[Parts, bytes]) -> int:
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(6)}")
    try:
        with open(temporary, "xb") as out:
            _add(out, INDEX, head)
            for member in index:
                is_blob = member.parts not in data
                content = _read_blob(store, member) if is_blob else data[member.parts]
                _add(out, member.name, content)
            out.write(bytes(2 * BLOCK))
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        os.replace(temporary, file)
    except OSError as error:
        raise StoreUnwritable(f"`{file}` cannot be written: {error.strerror}", hint="name another file") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return size


def _read_blob(store: DiskStore, member: Member) -> bytes:
    data = store.entries.read_blob(member.parts, member.digest, is_own=True, quiet=True)
    if len(data) != member.length:
        raise StoreError(f"blob `{member.digest}` changed while it was exported", hint="export again")
    return data


def _add(out: BinaryIO, name: str, data: bytes) -> None:
    out.write(_header(name, len(data)))
    out.write(data)
    out.write(bytes(-len(data) % BLOCK))


def _header(name: str, length: int) -> bytes:
    """Return the tar header of a member: nobody's, of no date, so that equal stores give equal files."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = length, 0o644
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def import_archive(store: DiskStore, file: Path) -> Archived:
    """Add what an archive holds to a store, once all of it was compared with its index.

    A store that believes signed records alone takes signed ones alone; under `own`, whoever imports answers for the
    file.
    """
    store.check_writable()
    try:
        with open(os.open(file, READ_FLAGS & ~os.O_NOFOLLOW), "rb") as archive:
            if not stat.S_ISREG(os.fstat(archive.fileno()).st_mode):
                raise OSError("not a file that can be read twice")
            records = _read_records(store, file, archive)
            archive.seek(0)
            blobs = 0
            for member, data in _read_members(file, archive, _read_index(file, archive)):
                if member.parts[0] == BLOBS:
                    store.write_blob(data)
                    blobs += 1
            size = archive.tell()
    except OSError as error:
        reason = error.strerror or "it is no plain file"
        raise OptionError(f"`{file}` cannot be read: {reason}", hint="name a file that export wrote") from error
    for (kind, key), (record, signatures) in records.items():
        store.write_record(kind, key, record)
        if signatures is not None:
            publish(store.path, signature_parts(kind, key), signatures)
    if store.kept_in_memory:
        raise StoreUnwritable(
            f"store `{store.path}` took only part of `{file}`", hint="make room and import again; what is there is kept"
        )
    return Archived(tuple(records), blobs, size)


def _read_records(
    store: DiskStore, file: Path, archive: BinaryIO
) -> dict[Name, tuple[dict[str, Any], bytes | None]]:
    """Read the whole file without writing; return its records, each verified and trusted, with its signatures."""
    found: dict[Name, tuple[dict[str, Any], bytes | None]] = {}
    signatures: dict[Parts, bytes] = {}
    for member, data in _read_members(file, archive, _read_index(file, archive)):
        if member.parts[0] == SIGNATURES:
            signatures[member.parts] = data
        if member.parts[0] != RECORDS:
            continue
        kind, key = member.parts[1], member.parts[3].removesuffix(RECORD_SUFFIX)
        try:
            body = unseal(RECORD_WORD, data)
            signed = signatures.get(signature_parts(kind, key))
            store.trust.check_record(kind, key, body, signed)
            found[kind, key] = decode_record(kind, key, body), signed
        except NewerFormat as error:
            raise _too_new(file, error) from None
        except Damaged as error:
            _refuse(file, f"`{member.name}`: {error}")
    return found


def _read_index(file: Path, archive: BinaryIO) -> list[Member]:
    """Read the first member, and refuse names that are no place of an entry in a store."""
    first = archive.read(BLOCK)
    try:
        length = int(first[124:135], 8)
    except ValueError:
        length = -1
    if not 0 <= length <= MAXIMUM_INDEX_BYTES or first != _header(INDEX, length):
        _refuse(file, "it does not begin with an index")
    data = _read_padded(file, archive, length, INDEX)
    try:
        listed = json.loads(unseal(ARCHIVE_WORD, data))
        index = [Member(tuple(name.split("/")), length, digest) for name, length, digest in listed]
    except NewerFormat as error:
        raise _too_new(file, error) from None
    except (Damaged, ValueError, TypeError, AttributeError, RecursionError) as error:
        _refuse(file, f"its index is damaged ({error})")
    for member in index:
        if not _has_place(member):
            _refuse(file, f"its index lists `{member.name}`, which has no place in a store")
    return index


def _has_place(member: Member) -> bool:
    if type(member.length) is not int or not 0 <= member.length <= MAXIMUM_BLOB_BYTES:
        return False
    top, name = member.parts[0], member.parts[-1]
    try:
        if top == BLOBS:
            return member.parts == blob_parts(name) and member.digest == name
        if top == RECORDS:
            return member.parts == record_parts(member.parts[1], name.removesuffix(RECORD_SUFFIX))
        if top == SIGNATURES:
            return member.parts == signature_parts(member.parts[1], name.removesuffix(SIGNATURE_SUFFIX))
    except (StoreError, IndexError):
        return False
    return member.parts == MARKER


def _read_members(file: Path, archive: BinaryIO, index: list[Member]) -> Iterator[tuple[Member, bytes]]:
    """Yield each member with its bytes, compared with the index."""
    for member in index:
        header = _header(member.name, member.length)
        if archive.read(len(header)) != header:
            _refuse(file, f"`{member.name}` does not stand where its index says")
        data = _read_padded(file, archive, member.length, member.name)
        if digest_bytes(data) != member.digest:
            _refuse(file, f"the digest of `{member.name}` differs from the one in its index")
        yield member, data
    if archive.read(2 * BLOCK + 1) != bytes(2 * BLOCK):
        _refuse(file, "its end is not where its index says")


def _read_padded(file: Path, archive: BinaryIO, length: int, name: str) -> bytes:
    left = os.fstat(archive.fileno()).st_size - archive.tell()
    data = archive.read(length) if length <= left else b""
    padding = -length % BLOCK
    if len(data) != length or archive.read(padding) != bytes(padding):
        _refuse(file, f"it ends within `{name}`")
    return data


def _refuse(file: Path, reason: str) -> NoReturn:
    raise CorruptEntry(
        f"archive `{file}` is damaged: {reason}; nothing was imported",
        hint="export it again; `tar` re-packs an archive in a way that is not read back",
        facts={"path": str(file), "reason": reason},
    )


def _too_new(file: Path, error: NewerFormat) -> FormatTooNew:
    return FormatTooNew(f"archive `{file}` is not read: {error}", hint="upgrade Piecework", facts={"path": str(file)})
