"""A program as bytes from one rank's store to another's, for stores that the ranks do not share.

Records and blobs are what a start reads and nothing else. A blob is written under the digest of its bytes, so one that
arrived otherwise than it left is not found under its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from piecework.errors import CorruptEntry
from piecework.store.protocol import PROGRAM, KernelStore
from piecework.store.references import artifacts_of, blobs_of
from piecework.values.digest import digest_data
from piecework.values.record import record_from


def fingerprint(key: str, store: KernelStore) -> str:
    """Return a digest of a program's records, which name all that it is made of: equal where two stores hold the same.

    One key may stand for other bytes in another store: where a piece was found wrong, its text stands in its place.
    """
    return digest_data(sorted([kind, name, dict(data)] for kind, name, data in _records(key, store)))


def pack(key: str, store: KernelStore) -> bytes:
    """Return a program, its siblings and its artifacts as bytes: a line of JSON with lengths, then the blobs."""
    records = _records(key, store)
    blobs = {digest: store.read_blob(digest) for kind, _, data in records for digest in blobs_of(kind, data)}
    head = {
        "records": [[kind, name, dict(data)] for kind, name, data in records],
        "blobs": [[digest, len(data)] for digest, data in blobs.items()],
    }
    line = json.dumps(head).encode()
    return b"".join([len(line).to_bytes(8, "little"), line, *blobs.values()])


def unpack(data: bytes, store: KernelStore) -> int:
    """Write into a store what `pack` made, and return its records' number: blobs first, what names others last."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    for digest, length in head["blobs"]:
        if store.write_blob(data[end : end + length]) != digest:
            raise CorruptEntry(
                f"blob `{digest[:12]}` came from another rank with other bytes than it has there",
                hint="start again; if it comes back, the network between the hosts alters what it carries",
            )
        end += length
    for kind, name, record in head["records"]:
        store.write_record(kind, name, record)
    return len(head["records"])


def _records(key: str, store: KernelStore) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return a program's records, artifacts first: what is named stands before what names it."""
    programs = [(PROGRAM, each, store.read_record(PROGRAM, each)) for each in _with_siblings(key, store)]
    artifacts = sorted({name for _, _, one in programs for name in artifacts_of(one)})
    return [*((*name, store.read_record(*name)) for name in artifacts), *programs]


def _with_siblings(key: str, store: KernelStore) -> tuple[str, ...]:
    record = record_from(store.read_record(PROGRAM, key))
    return (*record.siblings, key)
