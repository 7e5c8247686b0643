"""Work done once among the processes of a host, and records kept while a process uses them.

Both are `flock` locks: the kernel lets go of them when their process ends, however it ends, so none is ever stuck. A
record is held by a shared lock on the record itself, which writes nothing, so that a start from a read-only store holds
too.
Where a filesystem takes no locks, a lease (a file made with `O_EXCL` that names its owner) stands in for single flight.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from piecework.store.envelope import Damaged
from piecework.store.files import READ_FLAGS, ensure_folder, open_file, open_folder, remove
from piecework.store.layout import FLIGHTS, Parts, flight_name
from piecework.store.lease import Lease
from piecework.store.protocol import Flight

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
FIRST_WAIT_S, LONGEST_WAIT_S = 0.002, 0.05
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

Lock = Callable[[int, int], None]

# Descriptors of locks held now. A child made by `fork` shares them, and would keep a dead parent's lock.
_held: set[int] = set()


def _close_inherited() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


class LocksMissing(Exception):
    """The filesystem takes no locks. Never leaves the store."""


@contextmanager
def fly_once(
    root: Path, name: str, is_done: Callable[[], bool], timeout_s: float, lock: Lock = fcntl.flock
) -> Iterator[Flight]:
    """Enter as the one process of this host that does the work called `name`, or when another one has done it.

    Raises OSError where the folder takes no writes, and `TimeoutError` after `timeout_s`.
    """
    began, work = time.monotonic(), flight_name(name)
    with ensure_folder(root, (FLIGHTS,)) as folder:
        release = _acquire(folder, work, is_done, began + timeout_s, lock)
    waited_s = time.monotonic() - began
    if release is None:
        yield Flight(owned=False, exclusive=True, waited_s=waited_s)
        return
    try:
        owned = not is_done()
        if not owned:
            release()
        yield Flight(owned=owned, exclusive=True, waited_s=waited_s)
    finally:
        release()


def _acquire(
    folder: int, work: str, is_done: Callable[[], bool], deadline: float, lock: Lock
) -> Callable[[], None] | None:
    """Wait for the lock or for the work to be done; return how to let go, None if it is done."""
    lease: Lease | None = None
    pause_s = FIRST_WAIT_S
    try:
        while True:
            try:
                release = _try_lock(folder, f"{work}.lock", lock) if lease is None else lease.attempt()
            except LocksMissing:
                lease = Lease(f"{work}.lease", os.dup(folder))
                continue
            if release is not None:
                lease = None
                return release
            if is_done():
                return None
            if time.monotonic() > deadline:
                raise TimeoutError("another process held the work all along")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_WAIT_S)
    finally:
        if lease is not None:
            lease.close()


def _try_lock(folder: int, name: str, lock: Lock) -> Callable[[], None] | None:
    descriptor = os.open(name, LOCK_FLAGS, 0o600, dir_fd=folder)
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The collector deletes lock files that nobody holds: a lock on a deleted one keeps nobody out.
        kept = os.fstat(descriptor).st_nlink > 0
    except OSError as error:
        os.close(descriptor)
        if error.errno in NO_LOCKS:
            raise LocksMissing from error
        if isinstance(error, BlockingIOError):
            return None
        raise
    if not kept:
        os.close(descriptor)
        return _try_lock(folder, name, lock)
    _held.add(descriptor)
    return lambda: _let_go(descriptor)


def _let_go(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


class Hold:
    """Keeps a record from being evicted until it is closed, or its process ends."""

    def __init__(self, descriptor: int = -1) -> None:
        self._descriptor = descriptor

    @property
    def is_effective(self) -> bool:
        """Tell whether the record is held; not so where it is not on disk or the filesystem takes no locks."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Let go; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def hold_entry(root: Path, parts: Parts, lock: Lock = fcntl.flock) -> Hold:
    """Take a shared lock on an entry, without writing; an ineffective hold where that cannot be."""
    try:
        with open_file(root, parts) as (opened, _):
            descriptor = os.dup(opened)
    except (OSError, Damaged):
        return Hold()
    try:
        lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_evicted = os.fstat(descriptor).st_nlink == 0
    except OSError:
        is_evicted = True
    if is_evicted:
        os.close(descriptor)
        return Hold()
    return Hold(descriptor)


def is_held(root: Path, parts: Parts, lock: Lock = fcntl.flock) -> bool:
    """Tell whether a live process holds the entry; True as well where that cannot be found out."""
    return not _while_unheld(root, parts, lock, lambda: True)


def evict_entry(root: Path, parts: Parts, lock: Lock = fcntl.flock) -> bool:
    """Unlink an entry that nobody holds, while nobody can begin to; tell whether it is gone."""
    return _while_unheld(root, parts, lock, lambda: remove(root, parts))


def _while_unheld(root: Path, parts: Parts, lock: Lock, act: Callable[[], bool]) -> bool:
    try:
        with open_folder(root, parts[:-1]) as folder:
            descriptor = os.open(parts[-1], READ_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return act()
    except OSError:
        return False
    finally:
        os.close(descriptor)
