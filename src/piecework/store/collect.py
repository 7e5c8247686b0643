"""Keeping a store within bounds: the least recently used records go first, never one that a live process holds.

A record's last use is when it was written, when it was last read as the filesystem tells (`relatime` tells to the day),
or when its use was noted, whichever is latest. What a held record refers to is held with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from piecework.store.disk import DiskStore
from piecework.store.files import list_folder, open_folder, remove, remove_notes
from piecework.store.flight import Lock, evict_entry, is_held
from piecework.store.inventory import Name, StoredRecord, blob_sizes, close_over, list_entries, list_stored
from piecework.store.layout import (
    FLIGHTS,
    QUARANTINE,
    SIGNATURE_SUFFIX,
    SIGNATURES,
    STAGING,
    USE_SUFFIX,
    USES,
    Parts,
    blob_parts,
    record_parts,
    signature_parts,
    use_parts,
)
from piecework.store.owner import is_dead, parse_owner

# Blobs are written before the record that refers to them: a young one may be waiting for its record.
GRACE_S = 3600.0
DAY_S = 86400.0


@dataclass(frozen=True)
class Collected:
    """What a collection did."""

    evicted: tuple[Name, ...]
    held: tuple[Name, ...]
    blobs_removed: int
    rubbish_removed: int
    freed_bytes: int
    left_bytes: int


def collect(
    store: DiskStore,
    *,
    max_bytes: int | None = None,
    unused_s: float | None = None,
    grace_s: float = GRACE_S,
    lock: Lock = fcntl.flock,
) -> Collected:
    """Evict records until the store holds `max_bytes` at most, and those unused for `unused_s`; then lone blobs.

    Held records, and blobs written less than `grace_s` ago, stay, so that the bound may be missed; `left_bytes` tells.
    """
    store.check_writable()
    with store.single_flight("collect", timeout_s=60.0):
        rubbish, rubbish_bytes = _sweep_rubbish(store, grace_s, lock)
        sizes = blob_sizes(store)
        stored = {record.name: record for record in list_stored(store, blobs=sizes)}
        held = close_over(stored, (name for name in stored if is_held(store.path, record_parts(*name), lock)))
        plan = _Plan(stored, sizes, _spread_uses(stored))
        evicted = []
        for name in plan.oldest_first():
            too_old = unused_s is not None and time.time() - plan.uses[name] > unused_s
            too_much = max_bytes is not None and plan.kept_bytes > max_bytes
            if not (too_old or too_much) or name in held:
                continue
            if evict_entry(store.path, record_parts(*name), lock):
                remove_notes(store.path, *name)
                plan.drop(name)
                evicted.append(name)
        blobs, blob_bytes = _sweep_blobs(store, plan, sizes, grace_s)
        _sweep_companions(store)
    freed = rubbish_bytes + blob_bytes + sum(stored[name].size_bytes for name in evicted)
    left = sum(sizes.values()) - blob_bytes + sum(stored[n].size_bytes for n in stored.keys() - set(evicted))
    return Collected(tuple(evicted), tuple(sorted(held)), blobs, rubbish, freed, left)


class _Plan:
    """Which records stay, how often each blob is referred to by those, and what they take together."""

    def __init__(
        self, stored: Mapping[Name, StoredRecord], sizes: Mapping[str, int], uses: Mapping[Name, float]
    ) -> None:
        self.stored, self.sizes, self.uses = stored, sizes, uses
        self.references: dict[str, int] = {}
        for record in stored.values():
            for digest in record.blobs:
                self.references[digest] = self.references.get(digest, 0) + 1
        self.kept_bytes = sum(record.size_bytes for record in stored.values())
        self.kept_bytes += sum(sizes[digest] for digest in self.references)

    def oldest_first(self) -> list[Name]:
        """Return the records in the order in which they go: of one age, those that refer to others first."""
        return sorted(self.stored, key=lambda name: (self.uses[name], -len(self.stored[name].records), name))

    def drop(self, name: Name) -> None:
        """Count a record out."""
        self.kept_bytes -= self.stored[name].size_bytes
        for digest in self.stored[name].blobs:
            self.references[digest] -= 1
            if not self.references[digest]:
                self.kept_bytes -= self.sizes[digest]


def _spread_uses(stored: Mapping[Name, StoredRecord]) -> dict[Name, float]:
    """Return each record's last use, at least that of what refers to it: who uses a program uses its artifacts."""
    uses: dict[Name, float] = {}
    for record in sorted(stored.values(), key=lambda each: -each.last_use_s):
        for name in close_over(stored, [record.name], but=uses):
            uses[name] = record.last_use_s
    return uses


def _sweep_blobs(store: DiskStore, plan: _Plan, sizes: Mapping[str, int], grace_s: float) -> tuple[int, int]:
    count = freed = 0
    for digest, size in sizes.items():
        path = store.path.joinpath(*blob_parts(digest))
        with suppress(OSError):
            is_young = time.time() - os.lstat(path).st_mtime < grace_s
            if not plan.references.get(digest) and not is_young and remove(store.path, blob_parts(digest)):
                count, freed = count + 1, freed + size
    return count, freed


def _sweep_companions(store: DiskStore) -> None:
    """Remove signatures and noted uses of records that are gone."""
    for top, suffix, parts_of in ((SIGNATURES, SIGNATURE_SUFFIX, signature_parts), (USES, USE_SUFFIX, use_parts)):
        for parts, _ in list(list_entries(store.path, (top,), 2)):
            if len(parts) == 4 and parts[-1].endswith(suffix):
                kind, key = parts[1], parts[-1].removesuffix(suffix)
                if not os.path.lexists(store.path.joinpath(*record_parts(kind, key))):
                    remove(store.path, parts_of(kind, key))


def _sweep_rubbish(store: DiskStore, grace_s: float, lock: Lock) -> tuple[int, int]:
    """Remove what killed writers left, damage that was set aside, and locks that nobody has used for a day."""
    count = freed = 0
    for top, is_rubbish in ((STAGING, _is_abandoned), (QUARANTINE, lambda name, age_s: age_s > grace_s)):
        for name in list_folder(store.path, (top,)):
            status = _look(store, (top, name))
            if status and is_rubbish(name, time.time() - max(status.st_mtime, status.st_ctime)):
                _remove_all(store, (top, name), status)
                count, freed = count + 1, freed + status.st_size
    for name in list_folder(store.path, (FLIGHTS,)):
        status = _look(store, (FLIGHTS, name))
        if status and time.time() - status.st_mtime > DAY_S and name.endswith(".lock"):
            evict_entry(store.path, (FLIGHTS, name), lock)
    return count, freed


def _is_abandoned(name: str, age_s: float) -> bool:
    owner = parse_owner(name)
    return age_s > DAY_S if owner is None or not is_dead(owner) else True


def _look(store: DiskStore, parts: Parts) -> os.stat_result | None:
    try:
        with open_folder(store.path, parts[:-1]) as folder:
            return os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def _remove_all(store: DiskStore, parts: Parts, status: os.stat_result) -> None:
    with suppress(OSError):
        if stat.S_ISDIR(status.st_mode):  # by descriptor: where others write, a path may be a link by now
            with open_folder(store.path, parts[:-1]) as folder:
                shutil.rmtree(parts[-1], ignore_errors=True, dir_fd=folder)
        else:
            remove(store.path, parts)
