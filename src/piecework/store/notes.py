"""Texts for people beside a record: nothing reads them back, and they go when their record goes.

    records/<kind>/<2 letters>/<key>/<name>
"""

from __future__ import annotations

from pathlib import Path

from piecework.store.disk import DiskStore
from piecework.store.files import publish, remove_notes
from piecework.store.layout import note_parts
from piecework.store.protocol import Store

__all__ = ["note_parts", "remove_notes", "write_note"]


def write_note(store: Store, kind: str, key: str, name: str, text: str) -> Path | None:
    """Leave a text beside a record and return its path; None where the store has no folder that takes writes."""
    if not isinstance(store, DiskStore) or store.read_only:
        return None
    parts = (*note_parts(kind, key), name)
    try:
        publish(store.path, parts, text.encode())
    except OSError:
        return None
    return store.path.joinpath(*parts)
