"""Ranks agree before anyone compiles: who has the program, who builds it, and who is sent it.

Every step is one exchange in which each rank says how its part went. A rank that fails says so as well, so that all
raise the same error instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import piecework.errors as errors
from piecework.errors import ParallelError, PieceworkError
from piecework.events import Observer
from piecework.parallel.events import RanksAgreed
from piecework.parallel.ranks import Ranks
from piecework.parallel.transfer import fingerprint, pack, unpack
from piecework.store.protocol import KernelStore
from piecework.values.record import Record

Result = TypeVar("Result")
Found = tuple[str, Record]


@dataclass(frozen=True)
class Start:
    """What a start of several ranks is made of: each is a step that a rank takes by itself.

    `find` looks a record up that is whole, `build` makes one, `read` reads it and everything that it names.
    """

    find: Callable[[], Found | None]
    build: Callable[[], Found]
    read: Callable[[str], Record]


def together(ranks: Ranks, what: str, step: Callable[[], tuple[Result, Any]]) -> tuple[Result, list[Any]]:
    """Take a step on every rank; where one failed, raise its error on all. Return the result and what each told.

    A step returns its result and what the others are to know, as plain data.
    """
    result: Any = None
    failed: Exception | None = None
    told: Any = None
    try:
        result, told = step()
    except Exception as error:  # noqa: BLE001  whatever it is, the others must not wait for this rank
        failed = error
    shared = ranks.share({"error": error_data(failed), "told": told})
    if failed is not None and not isinstance(failed, PieceworkError):
        raise failed
    for rank, each in enumerate(shared):
        if each["error"] is not None:
            raise failed if rank == ranks.rank and failed is not None else error_from(each["error"], rank, what)
    return result, [each["told"] for each in shared]


def agree(ranks: Ranks, start: Start, store: KernelStore, observer: Observer) -> Found:
    """Return the record that all ranks start from: found by one of them, or built by one while the others wait."""
    found = look_up(ranks, start)
    if found is not None:
        return found[0], deliver(ranks, start, *found, store, observer, is_hit=True)
    _, keys = together(ranks, "building the program", lambda: _looked(start.build() if ranks.rank == 0 else None))
    return keys[0], deliver(ranks, start, keys[0], 0, store, observer, is_hit=False)


def look_up(ranks: Ranks, start: Start) -> tuple[str, int] | None:
    """Return the program that all ranks start from and the first rank that has it; None where none has it."""
    _, hits = together(ranks, "looking the program up", lambda: _looked(start.find()))
    owner = next((rank for rank, key in enumerate(hits) if key), 0)
    return (hits[owner], owner) if hits[owner] else None


def deliver(
    ranks: Ranks, start: Start, key: str, owner: int, store: KernelStore, observer: Observer, *, is_hit: bool
) -> Record:
    """Have the owner send the program to those whose stores hold it not, or otherwise; return its record."""
    record, prints = together(ranks, "reading the program", lambda: _read(start, key, store))
    have = tuple(each == prints[owner] != "" for each in prints)
    observer(RanksAgreed(rank=ranks.rank, ranks=ranks.size, key=key, owner=owner, is_hit=is_hit, had=have))
    if not all(have):
        data, _ = together(
            ranks, "sending the program", lambda: (pack(key, store) if ranks.rank == owner else b"", None)
        )
        sent = ranks.send(data, owner)
        together(ranks, "storing the program", lambda: (None, None if have[ranks.rank] else unpack(sent, store)))
        record, _ = together(ranks, "reading the program", lambda: (start.read(key), None))
    assert record is not None
    return record


def _looked(found: Found | None) -> tuple[Found | None, str]:
    return found, found[0] if found is not None else ""


def _read(start: Start, key: str, store: KernelStore) -> tuple[Record | None, str]:
    """Read a program, and tell what a rank's store holds of it: nothing where it is not there whole."""
    try:
        return start.read(key), fingerprint(key, store)
    except errors.StoreError:
        return None, ""


def told(said: dict[str, Any], what: str, rank: int = 0) -> Any:
    """Return what another rank told; raise its error anew where it failed."""
    if said["error"] is not None:
        raise error_from(said["error"], rank, what)
    return said["told"]


def error_data(error: Exception | None) -> dict[str, Any] | None:
    """Return an error as plain data for another rank."""
    if error is None:
        return None
    if isinstance(error, PieceworkError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"kind": "", "message": f"{type(error).__name__}: {error}", "hint": "it is told on that rank"}


def error_from(data: dict[str, Any], rank: int, what: str) -> PieceworkError:
    """Make another rank's error anew, of the same class."""
    kind = getattr(errors, data["kind"], None) if data["kind"] else ParallelError
    known = kind if isinstance(kind, type) and issubclass(kind, PieceworkError) else ParallelError
    return known(f"rank {rank}, {what}: {data['message']}", hint=data["hint"], facts={"rank": rank})
