"""The stored record that is nearest to what was looked for, to say on a miss which factors moved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from piecework.errors import StoreError
from piecework.store.protocol import Store
from piecework.values.key import differing

# A miss costs seconds of work; saying why may cost so much of it, whatever the store holds.
LONGEST_S = 0.25


@dataclass(frozen=True)
class Nearest:
    """The nearest of the records that were compared: `compared` of `known`; an empty key where there is none."""

    key: str = ""
    differences: tuple[str, ...] = ()
    compared: int = 0
    known: int = 0

    def __str__(self) -> str:
        """Name the record, and say of how many it is the nearest if not of all."""
        some = "" if self.compared == self.known else f" (of {self.compared} compared, {self.known} are stored)"
        return f"`{self.key[:20]}`{some}"


@dataclass
class Neighbours:
    """The factors of a store's records of one kind: read once, as many as there is time for, then compared.

    Of records with equal factors (the group of a key) one is read.
    """

    store: Store
    kind: str
    longest_s: float = LONGEST_S
    _factors: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _known: int = -1
    _lock: Lock = field(default_factory=Lock)

    def nearest(self, factors: Mapping[str, Any], like: Mapping[str, Any] | None = None) -> Nearest:
        """Return the record whose factors differ least from `factors`, of those that have the factors of `like`."""
        with self._lock:
            self._read()
        best: tuple[int, str, tuple[str, ...]] | None = None
        for key, other in self._factors.items():
            if any(other.get(name) != value for name, value in (like or {}).items()):
                continue
            found = tuple(differing(other, factors))
            if found and (best is None or len(found) < best[0]):
                best = len(found), key, found
        if best is None:
            return Nearest(known=max(self._known, 0))
        return Nearest(best[1], best[2], len(self._factors), self._known)

    def _read(self) -> None:
        if self._known >= 0:
            return
        first_of_group: dict[str, str] = {}
        for key in self.store.list_records(self.kind):
            first_of_group.setdefault(key.partition(".")[0], key)
        self._known, began = len(first_of_group), time.monotonic()
        for key in first_of_group.values():
            try:
                factors = self.store.read_record(self.kind, key).get("factors")
            except StoreError:
                factors = None
            if isinstance(factors, Mapping):
                self._factors[key] = factors
            else:
                self._known -= 1
            if time.monotonic() - began > self.longest_s:
                return
