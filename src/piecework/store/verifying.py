"""A store for audits: nothing is taken from the store behind it; what is made anew is compared with what lies there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecework.errors import StoreError
from piecework.events import Observer, StoreWarning, ignore
from piecework.store.memory import MemoryStore
from piecework.store.protocol import ARTIFACT, PROGRAM, Flight, Store, never_done
from piecework.values.key import differing

# What an artifact runs; its other facts hold what was measured when it was made.
RUNS = ("kind", "text", "kernels", "guards")


@dataclass(frozen=True)
class Difference:
    """A stored record that is not what is made of the same inputs now."""

    kind: str
    key: str
    what: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} `{self.key}`: {'; '.join(self.what)}"


class VerifyingStore:
    """Make everything anew, keep it in memory, and compare it with what another store holds under the same keys.

    A compile through it takes as long as a cold one and leaves the other store as it is. `differences` are the records
    that are not what they should be, `compared` counts those that were looked at, `unknown` those that the other store
    does not have.
    """

    def __init__(self, audited: Store, *, observer: Observer = ignore) -> None:
        self.audited = audited
        self.observer = observer
        self.differences: list[Difference] = []
        self.compared = self.unknown = 0
        self._made = MemoryStore(observer=observer)

    def __repr__(self) -> str:
        return f"VerifyingStore({self.audited!r})"

    def __bool__(self) -> bool:
        return True

    def read_blob(self, digest: str) -> bytes:
        return self._made.read_blob(digest)

    def write_blob(self, data: bytes) -> str:
        return self._made.write_blob(data)

    def has_blob(self, digest: str) -> bool:
        return self._made.has_blob(digest)

    def kernel_path(self, digest: str) -> Path:
        return self._made.kernel_path(digest)

    def read_record(self, kind: str, key: str) -> dict[str, Any]:
        return self._made.read_record(kind, key)

    def write_record(self, kind: str, key: str, record: Mapping[str, Any]) -> None:
        self._made.write_record(kind, key, record)
        self._compare(kind, key, self._made.read_record(kind, key))

    def layer_of(self, kind: str, key: str) -> str:
        """Return the layer that serves what was made here: memory."""
        return self._made.layer_of(kind, key)

    def more_records(self, kind: str, group: str) -> list[str]:
        """Return nothing: what is stored is made anew."""
        return []

    def list_records(self, kind: str, group: str = "") -> list[str]:
        return self._made.list_records(kind, group)

    def delete_record(self, kind: str, key: str) -> None:
        self._made.delete_record(kind, key)

    @property
    def is_vouched_for(self) -> bool:
        """Whether records can be believed: this process made them."""
        return True

    def set_aside(self, kind: str, key: str, reason: str) -> None:
        """Forget a record that was found to be wrong; the audited store stays as it is."""
        self._made.delete_record(kind, key)

    def fillable(self) -> None:
        """Return None: what is compared is made in this process."""

    def write_back(self, key: str) -> None:
        """Do nothing: the audited store stays as it is."""

    def single_flight(
        self, name: str, is_done: Callable[[], bool] = never_done, timeout_s: float = 600.0
    ) -> AbstractContextManager[Flight]:
        """Enter with the right to do the work once among this process's threads."""
        return self._made.single_flight(name, is_done, timeout_s)

    def hold(self, kind: str, key: str) -> AbstractContextManager[object]:
        """Keep nothing from being evicted: what was made here stays as long as this object."""
        return self._made.hold(kind, key)

    def _compare(self, kind: str, key: str, made: Mapping[str, Any]) -> None:
        try:
            stored = self.audited.read_record(kind, key)
        except StoreError as error:
            self._without_equal(kind, key, made, error)
            return
        self.compared += 1
        wanted = {name: made.get(name) for name in RUNS} if kind == ARTIFACT else made
        found = {name: stored.get(name) for name in RUNS} if kind == ARTIFACT else stored
        if wanted != found:
            self._report(Difference(kind, key, tuple(differing(found, wanted))))

    def _without_equal(self, kind: str, key: str, made: Mapping[str, Any], error: StoreError) -> None:
        """Note a record that is not stored; a program's key holds its content's digest: compare with its group's."""
        if error.facts.get("damaged"):
            self.compared += 1
            self._report(Difference(kind, key, (str(error.facts.get("reason", error.message)),)))
            return
        group = key.partition(".")[0]
        others = self.audited.list_records(kind, group) if kind == PROGRAM else []
        if not others:
            self.unknown += 1
            return
        self.compared += 1
        nearest = min((differing(self.audited.read_record(kind, other), made) for other in others), key=len)
        self._report(Difference(kind, key, tuple(nearest)))

    def _report(self, difference: Difference) -> None:
        self.differences.append(difference)
        self.observer(StoreWarning(path=difference.key, reason=f"it is not what is made now: {difference}"))
