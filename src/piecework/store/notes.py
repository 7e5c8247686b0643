"""Texts for people beside a record: nothing reads them back, and they go when their record goes.

    records/<kind>/<2 letters>/<key>/<name>
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from piecework.store.disk import DiskStore
from piecework.store.files import list_folder, open_folder, publish, remove
from piecework.store.layout import RECORD_SUFFIX, Parts, record_parts
from piecework.store.protocol import Store


def note_parts(kind: str, key: str) -> Parts:
    """Return the folder of a record's notes, below the store's."""
    parts = record_parts(kind, key)
    return (*parts[:-1], parts[-1].removesuffix(RECORD_SUFFIX))


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


def remove_notes(root: Path, kind: str, key: str) -> None:
    """Delete what was left beside a record."""
    parts = note_parts(kind, key)
    for name in list_folder(root, parts):
        remove(root, (*parts, name))
    with suppress(OSError), open_folder(root, parts[:-1]) as folder:
        os.rmdir(parts[-1], dir_fd=folder)
