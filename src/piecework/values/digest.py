"""Digests of bytes, text and plain data; torch-free."""

from __future__ import annotations

import hashlib
import json
import types
from typing import Any


def digest_bytes(data: bytes) -> str:
    """Return the SHA-256 of `data` as hex."""
    return hashlib.sha256(data).hexdigest()


def digest_text(text: str) -> str:
    """Return the SHA-256 of `text` in UTF-8 as hex."""
    return digest_bytes(text.encode())


def canonical_json(value: Any) -> str:
    """Write plain data as JSON that is the same for equal data in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_data(value: Any) -> str:
    """Return the digest of plain data (mappings, sequences, strings, numbers, None)."""
    return digest_text(canonical_json(value))


def digest_code(code: types.CodeType) -> str:
    """Return the digest of what a code object does: instructions, constants and names, not lines or comments."""

    def constant(value: Any) -> str:
        if isinstance(value, types.CodeType):
            return digest_code(value)
        if isinstance(value, frozenset):
            return repr(sorted(map(repr, value)))
        return f"{type(value).__name__}:{value!r}"

    constants = [constant(value) for value in code.co_consts]
    return digest_text(repr((code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars)))
