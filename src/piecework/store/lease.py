"""Single flight where a filesystem takes no locks: a file made with `O_EXCL` that names its owner.

The owner's name is the file's content, and with a random token it is the content of no other lease. A dead owner's
lease is taken away by whoever first makes a second lease, named after that token: two processes that find it dead at
once can so never take away the living lease that one of them has made meanwhile. Should that one die too, its lease is
found dead in the same way.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from piecework.store.owner import current_owner, is_dead, parse_owner, place
from piecework.values.digest import digest_text

LEASE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A process that dies between making its lease and writing its name into it leaves a nameless one.
NAMELESS_S = 5.0


class Lease:
    """The right to a piece of work on this host; leases of other hosts have other names."""

    def __init__(self, name: str, folder: int) -> None:
        self.name = f"{place()}.{name}"
        self.folder = folder
        self._is_open = True

    def close(self) -> None:
        """Give up asking; a second time does nothing."""
        if self._is_open:
            self._is_open = False
            os.close(self.folder)

    def attempt(self) -> Callable[[], None] | None:
        """Try once to get the lease; return how to let go, None if a live process has it."""
        token = f"{current_owner().as_name()}.{secrets.token_hex(8)}"
        if not self._take(self.name, token, depth=0):
            return None
        return lambda: self._let_go(token)

    def _take(self, name: str, token: str, depth: int) -> bool:
        if self._make(name, token):
            return True
        found = self._read(name)
        if not self._is_dead(name, found) or depth > 8:
            return False
        # One guard for each dead lease, under a name of fixed length however deep the deaths go.
        guard = f"{place()}.{digest_text(f'{name} {found}')[:32]}.guard"
        if not self._take(guard, token, depth + 1):
            return False
        # Once more: a nameless lease has the content of every other nameless one, and this one may be a second old.
        if self._read(name) == found and self._is_dead(name, found):
            self._unlink(name)
        made = self._make(name, token)
        self._unlink(guard)
        return made

    def _make(self, name: str, token: str) -> bool:
        try:
            descriptor = os.open(name, LEASE_FLAGS, 0o600, dir_fd=self.folder)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, token.encode())
        finally:
            os.close(descriptor)
        return True

    def _read(self, name: str) -> str | None:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.folder)
        except OSError:
            return None
        try:
            return os.read(descriptor, 200).decode("ascii", "replace")
        finally:
            os.close(descriptor)

    def _is_dead(self, name: str, content: str | None) -> bool:
        if content is None:
            return False
        owner = parse_owner(content)
        if owner is not None:
            return is_dead(owner)
        with suppress(OSError):
            age_s = time.time() - os.stat(name, dir_fd=self.folder, follow_symlinks=False).st_mtime
            return age_s > NAMELESS_S
        return False

    def _let_go(self, token: str) -> None:
        if self._is_open and self._read(self.name) == token:
            self._unlink(self.name)
        self.close()

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.folder)
