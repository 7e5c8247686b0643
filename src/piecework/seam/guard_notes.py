"""What Dynamo would have guarded, as notes that outlive it: kind, place, value, and the user's line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecework.values.sources import OWNER, class_source, on_class, owner_of

# Hooks of all modules, which Dynamo takes for unchanging.
_MODULES = "G['__import_torch_dot_nn_dot_modules_dot_module']"
_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


@dataclass(frozen=True)
class GuardNote:
    """A guard that Dynamo would have installed, with the user's line where it is known."""

    kind: str
    source: str
    value: Any
    line: str


def notes_of(entry: Any) -> Iterator[GuardNote]:
    """Yield what one guard of Dynamo holds, with sources that `stages/evidence.py` reads again in another process."""
    stack = getattr(entry.orig_guard, "user_stack", None)
    line = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    kind, source = entry.guard_type, entry.orig_guard.name
    given = getattr(entry.orig_guard.create_fn, "keywords", {})
    attribute, key = given.get("attr", ""), given.get("key")
    if kind == "HASATTR":
        yield GuardNote(kind, f"hasattr({source}, {attribute!r})", hasattr(entry.value, attribute), line)
    elif kind == "NOT_PRESENT_IN_GENERIC_DICT":
        # Found on a class: an attribute of the object's own would stand before it, and so would another class's.
        yield GuardNote(kind, f"{attribute!r} in {source}.__dict__", False, line)
        where = class_source(type(entry.value)) or f"type({source})"
        yield GuardNote("OWNER", f"{OWNER}({where}, {attribute!r})", owner_of(type(entry.value), attribute), line)
    elif kind.endswith("_CONTAINS") and isinstance(key, int | str | bool | None):
        yield GuardNote(kind, f"{key!r} in {source}", key in entry.value, line)
    else:
        yield GuardNote(kind, on_class(source), entry.value if entry.has_value else None, line)


def all_notes(notes: Sequence[GuardNote], read: Sequence[str]) -> list[GuardNote]:
    """Return the notes of a trace, with what no guard holds; `read` are the sources of tensors that the graph reads."""
    hooks = [(name, getattr(torch.nn.modules.module, name)) for name in _HOOKS]
    return [
        *(replace(n, kind="UNREAD") if n.kind == "TENSOR_MATCH" and n.source not in read else n for n in notes),
        *(GuardNote("DICT_KEYS_MATCH", f"{_MODULES}.{name}", table, "") for name, table in hooks),
    ]
