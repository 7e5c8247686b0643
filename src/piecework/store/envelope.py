"""The frame round a record: one line that says what follows, how long it is and what its digest must be.

    piecework-record <format> <length of the body> <sha256 of "piecework-record <format>\\n" and the body>
    <body: canonical JSON with `key`, `kind` and `payload`>

The first line keeps this shape in every later format, so that an older release can tell a newer file from a damaged
one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from piecework.store.layout import FORMAT
from piecework.values.digest import canonical_json, digest_bytes

RECORD_WORD = "piecework-record"
STORE_WORD = "piecework-store"
MAXIMUM_RECORD_BYTES = 64 << 20
_HEAD = re.compile(rb"([a-z-]{1,40}) ([1-9][0-9]{0,5}) (0|[1-9][0-9]{0,15}) ([0-9a-f]{64})\n")


class Damaged(Exception):
    """Bytes that are not what was written; the message says in what way. Never leaves the store."""


class NewerFormat(Exception):
    """Bytes that are whole, in a format this release does not know. Never leaves the store."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it has format {version}; this release knows format {FORMAT}")
        self.version = version


def seal(word: str, body: bytes, version: int = FORMAT) -> bytes:
    """Put a body into its frame."""
    return f"{word} {version} {len(body)} {_digest(word, version, body)}\n".encode() + body


def unseal(word: str, data: bytes) -> bytes:
    """Return the body, once its length and digest have been compared; raises `Damaged` or `NewerFormat`."""
    head = _HEAD.match(data)
    if not data:
        raise Damaged("it is empty")
    if head is None or head[1] != word.encode():
        raise Damaged(f"it does not begin as a `{word}`")
    version, length, digest = int(head[2]), int(head[3]), head[4].decode()
    body = data[head.end() :]
    if len(body) != length:
        raise Damaged(f"{len(body)} bytes follow its first line, which says {length}")
    if _digest(word, version, body) != digest:
        raise Damaged("its digest differs from the one it was written with")
    if version > FORMAT:
        raise NewerFormat(version)
    return body


def encode_record(kind: str, key: str, payload: Mapping[str, Any]) -> bytes:
    """Return the body that holds a record, as canonical JSON."""
    return canonical_json({"key": key, "kind": kind, "payload": dict(payload)}).encode()


def decode_record(kind: str, key: str, body: bytes) -> dict[str, Any]:
    """Return the record in a body that was verified, if it is the one asked for; raises `Damaged`."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Damaged("its body is not JSON") from None
    if not isinstance(content, dict) or set(content) != {"key", "kind", "payload"}:
        raise Damaged("its body does not hold a key, a kind and a payload")
    if (content["kind"], content["key"]) != (kind, key):
        raise Damaged(f"it holds the {content['kind']} record `{content['key']}`")
    if not isinstance(content["payload"], dict):
        raise Damaged("its payload is not a mapping")
    return content["payload"]


def _digest(word: str, version: int, body: bytes) -> str:
    return digest_bytes(f"{word} {version}\n".encode() + body)
