"""What is wrong with a stored record, though its bytes are whole: judged by its key and its shape; torch-free.

A program's key ends with the digest of the record, and begins, as an artifact's does, with that of its factors. A
record of another model, one with a part of another, one that was edited: none of them has the key it lies under. Of
what an artifact runs its key says nothing; there its shape is looked at, and whoever may write one may run code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piecework.errors import CorruptEntry
from piecework.values.key import key_of, program_key
from piecework.values.record import record_from

_SHAPE: Mapping[str, type | tuple[type, ...]] = {
    "kind": str, "text": str, "kernels": dict, "guards": list, "facts": dict, "factors": dict, "size_bytes": int,
}  # fmt: skip


def program_fault(key: str, data: Mapping[str, Any]) -> str:
    """Say what is wrong with a program's record under `key`, and an empty string if nothing."""
    try:
        record_from(data)
    except CorruptEntry as error:
        return error.message
    return _key_fault(key, lambda: program_key(data["factors"], data))


def artifact_fault(key: str, data: Mapping[str, Any]) -> str:
    """Say what is wrong with an artifact's record under `key`, and an empty string if nothing."""
    for name, kind in _SHAPE.items():
        if not isinstance(data.get(name), kind):
            return f"it does not hold what an artifact's format says: `{name}` is {_named(data, name)}"
    if not all(isinstance(digest, str) for digest in data["kernels"].values()):
        return "it does not hold what an artifact's format says: a kernel is no digest"
    if not all(isinstance(guard, str) for guard in data["guards"]):
        return "it does not hold what an artifact's format says: a guard is no text"
    return _key_fault(key, lambda: key_of(data["factors"]))


def _named(data: Mapping[str, Any], name: str) -> str:
    return f"`{str(data[name])[:40]}`" if name in data else "missing"


def _key_fault(key: str, make: Callable[[], str]) -> str:
    try:
        found = make()
    except (TypeError, ValueError, RecursionError) as error:  # numbers that JSON does not have, no mapping
        return f"no key can be made of it: {error}"
    return "" if found == key else "its key was made of other content: it is another record, or was changed"


CHECKS: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {"program": program_fault, "artifact": artifact_fault}
"""What a store asks of a record that it reads, by its kind."""
