"""What a record refers to, and what can be a record's name; whatever a remote says is taken for possible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from piecework.errors import StoreError
from piecework.store.entries import FAULTS_OF_A_RECORD
from piecework.store.layout import digests_in, is_digest, record_parts
from piecework.store.protocol import ARTIFACT, PROGRAM

Name = tuple[str, str]


def blobs_of(kind: str, record: Mapping[str, Any]) -> set[str]:
    """Return the blobs that a record is read with; of a kind unknown here, whatever looks like one."""
    found: list[Any] = []
    with suppress(*FAULTS_OF_A_RECORD):  # what is wrong with a record is said by whoever reads it
        found = _blobs_of(kind, record)
    return {digest for digest in found if isinstance(digest, str) and is_digest(digest)}


def _blobs_of(kind: str, record: Mapping[str, Any]) -> list[Any]:
    if kind == PROGRAM:
        return [record.get("evidence"), record.get("constants"), *(p.get("text") for p in record.get("pieces", ()))]
    if kind == ARTIFACT:
        return [record.get("text"), *record.get("kernels", {}).values()]
    return list(digests_in(json.dumps(record)))


def artifacts_of(record: Mapping[str, Any]) -> list[Name]:
    """Return the artifacts that a program names."""
    keys: set[Any] = set()
    with suppress(*FAULTS_OF_A_RECORD):
        keys = {key for piece in record.get("pieces", ()) for key in piece.get("artifacts", {}).values()}
    return [(ARTIFACT, key) for key in sorted(key for key in keys if isinstance(key, str))]


def is_name(kind: str, key: str) -> bool:
    """Tell whether kind and key can name a record: a remote may say anything."""
    try:
        record_parts(kind, key)
    except StoreError:
        return False
    return True
