"""What every store can do; torch-free.

A *blob* is bytes named by their SHA-256. A *record* is plain data under a kind and a key; it refers to blobs by digest.
Blobs are written first and the record last, so that whoever finds a record finds what it refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROGRAM = "program"
ARTIFACT = "artifact"
PROBE = "probe"
MEMORY, DISK, REMOTE = "memory", "disk", "remote"

Record = Mapping[str, Any]

# Says what is wrong with a record of one kind under its key, or "" where nothing is. A KeyError, TypeError, ValueError,
# IndexError or AttributeError that it raises counts as a fault of the record.
RecordCheck = Callable[[str, Record], str]


class Store(Protocol):
    """A place for records and blobs; a damaged or absent entry is `ArtifactMissing`, under `strict` `CorruptEntry`."""

    def read_blob(self, digest: str) -> bytes:
        """Return the bytes whose SHA-256 is `digest`, compared with it before they are returned."""

    def write_blob(self, data: bytes) -> str:
        """Keep `data` and return its SHA-256 as hex; the same bytes are kept once."""

    def has_blob(self, digest: str) -> bool:
        """Tell whether the bytes of `digest` are here and whole."""

    def read_record(self, kind: str, key: str) -> Record:
        """Return the record under `kind` and `key`, verified."""

    def write_record(self, kind: str, key: str, record: Record) -> None:
        """Keep plain data under `kind` and `key`, after all the blobs it refers to; replaces what was there."""

    def list_records(self, kind: str, group: str = "") -> list[str]:
        """Return the keys of one kind in order; with `group`, those that begin with `<group>.`."""

    def delete_record(self, kind: str, key: str) -> None:
        """Forget a record; its blobs stay until they are collected. An absent one is no error."""


@dataclass(frozen=True)
class Flight:
    """The outcome of asking for the right to do a piece of work once.

    `owned`: do the work now (False: another process finished it while this one waited, so read it).
    `exclusive`: nobody else on this host does it meanwhile (False where the folder takes no locks, or after a timeout).
    `waited_s`: how long another process held the work.
    """

    owned: bool
    exclusive: bool
    waited_s: float


def never_done() -> bool:
    """Say that no other process has finished the work."""
    return False


class SharedStore(Store, Protocol):
    """A store that several processes share."""

    def single_flight(
        self, name: str, is_done: Callable[[], bool] = never_done, timeout_s: float = 600.0
    ) -> AbstractContextManager[Flight]:
        """Enter with the right to do the work called `name`, or after another process has done it.

        `is_done` should look at all that the work makes: a record may outlive a blob that was damaged or deleted.
        """

    def hold(self, kind: str, key: str) -> AbstractContextManager[object]:
        """Keep a record, and all it refers to, from being evicted while the context is open."""

    def more_records(self, kind: str, group: str) -> list[str]:
        """Return the keys of a group that a layer further away has beside those of `list_records`; may take time."""

    def layer_of(self, kind: str, key: str) -> str:
        """Return which layer serves a record: `memory`, `disk` or `remote`."""

    @property
    def is_vouched_for(self) -> bool:
        """Whether somebody who may run code here stands for what records say, beside what their digests prove."""

    def set_aside(self, kind: str, key: str, reason: str) -> None:
        """Have a record read no more that was found to be wrong, whole as it is; a folder keeps it in quarantine."""


class KernelStore(SharedStore, Protocol):
    """A store that can hand a blob to the dynamic linker, and be filled by another process."""

    def kernel_path(self, digest: str) -> Path:
        """Return a path by which the verified bytes of `digest` can be opened by `dlopen` while this process lives."""

    def fillable(self) -> FolderStore | None:
        """Return the folder that another process of this user can fill for this store; None where there is none."""

    def write_back(self, key: str) -> None:
        """Have a program that another process put into that folder written on to where the store keeps its own."""


class FolderStore(KernelStore, Protocol):
    """A store in a folder, which another process opens by its path."""

    path: Path
