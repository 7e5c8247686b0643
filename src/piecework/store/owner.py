"""Which process a file belongs to, and whether it still lives.

A number of a process is reused, means nothing on another host and differs between containers of one host: an owner is
the start of the machine, the process namespace, the number and the start of the process together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from piecework.values.digest import digest_text


@dataclass(frozen=True)
class Owner:
    """A process: `place` is where its number means something, `started` when it began (clock ticks after boot)."""

    place: str
    pid: int
    started: int

    def as_name(self) -> str:
        """Write the owner as part of a file name; `parse_owner` reads it back."""
        return f"{self.place}-{self.pid}-{self.started}"


def current_owner() -> Owner:
    """Return this process."""
    return _owner_of(os.getpid())


@lru_cache(maxsize=8)
def _owner_of(pid: int) -> Owner:
    return Owner(place(), pid, started_at(pid))


def parse_owner(name: str) -> Owner | None:
    """Read the owner at the start of a file name; None if the name was not made by `as_name`."""
    parts = name.split(".")[0].split("-")
    if len(parts) != 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return Owner(parts[0], int(parts[1]), int(parts[2]))


def is_dead(owner: Owner) -> bool:
    """Tell whether the process has certainly ended; one of another host or container is not known to have."""
    if owner.place != place():
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except OverflowError:  # no process ever had that number
        return True
    except PermissionError:
        pass
    return started_at(owner.pid) not in (owner.started, 0) or _is_zombie(owner.pid)


@lru_cache(maxsize=1)
def place() -> str:
    """Return a name for the running machine and process namespace; it changes with each start of the machine."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("/pid") else _read(path))
        except OSError:
            parts.append(os.uname().nodename)
    return digest_text("\n".join(parts))[:12]


def started_at(pid: int) -> int:
    """Return when a process began, in clock ticks after boot; 0 where that cannot be read."""
    fields = _status_fields(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def _is_zombie(pid: int) -> bool:
    return _status_fields(pid)[:1] in (["Z"], ["X"])


def _status_fields(pid: int) -> list[str]:
    """Return the fields of a process's state after its name, which may hold blanks and brackets."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return []


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read().strip()
