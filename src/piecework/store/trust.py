"""Whom a store believes: an artifact is code, so whoever may write one may run code as whoever loads it.

`own`     only what this user wrote, in folders that only this user (and root) can write; the default
`signed`  only records signed by a listed key, wherever they lie (`piecework.store.signing`)
`any`     everything whose digest is right; must be spelt out
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from piecework.errors import UntrustedArtifact

OWN, SIGNED, ANY = "own", "signed", "any"
POLICIES = (OWN, SIGNED, ANY)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT_USER = 0


class Trust(Protocol):
    """A policy. Each check raises `UntrustedArtifact`, before a byte of what it refuses is interpreted."""

    @property
    def name(self) -> str: ...

    @property
    def needs_signature(self) -> bool: ...

    def check_folder(self, root: Path) -> None:
        """Check the store's folder and the folders above it."""

    def check_file(self, path: Path, status: os.stat_result) -> None:
        """Check one opened entry, or a folder of the store on the way to it."""

    def check_record(self, kind: str, key: str, body: bytes, signatures: bytes | None) -> frozenset[str]:
        """Check one record's body and what was signed for it; return the digests of the blobs it vouches for."""


@dataclass(frozen=True)
class OwnFiles:
    """Believe what this user wrote, in folders that nobody but this user and root can write."""

    user: int = field(default_factory=os.geteuid)
    name: str = OWN
    needs_signature: bool = False

    def check_folder(self, root: Path) -> None:
        with suppress(OSError):
            owner = os.stat(root).st_uid
            if owner != self.user:
                raise _foreign(root, owner, self.user, root)
        fault = find_open_folder(root, self.user)
        if fault:
            path, reason = fault
            raise UntrustedArtifact(
                f"store `{root}` is not loaded from: {reason}",
                hint=f"`chmod go-w {path}` if nobody else wrote there, or give another folder with `--store`; a folder "
                f"that others write is safe under `signed` alone",
                facts={"path": str(path), "store": str(root), "policy": OWN},
            )

    def check_file(self, path: Path, status: os.stat_result) -> None:
        if status.st_uid != self.user:
            raise _foreign(path, status.st_uid, self.user, path.parent)
        if status.st_mode & OTHERS_WRITE:
            raise UntrustedArtifact(
                f"`{path}` is not loaded: others than its owner can write it (mode {stat.S_IMODE(status.st_mode):04o})",
                hint=f"delete it, or `chmod go-w {path}` if nobody else wrote it",
                facts={"path": str(path), "mode": stat.S_IMODE(status.st_mode), "policy": OWN},
            )

    def check_record(self, kind: str, key: str, body: bytes, signatures: bytes | None) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True)
class AnyFiles:
    """Believe whatever has the right digest: for folders whose every writer may run code here anyway."""

    name: str = ANY
    needs_signature: bool = False

    def check_folder(self, root: Path) -> None:
        return

    def check_file(self, path: Path, status: os.stat_result) -> None:
        return

    def check_record(self, kind: str, key: str, body: bytes, signatures: bytes | None) -> frozenset[str]:
        return frozenset()


def find_open_folder(root: Path, user: int) -> tuple[Path, str] | None:
    """Return the first folder, or link, on the way to `root` through which another user could change what lies there.

    A folder with the sticky bit, such as `/tmp`, lets others add names but not take away ours. Links on the way count
    by their owner, and then the folders they lead to count as well.
    """
    written = Path(os.path.abspath(root))
    for target in dict.fromkeys((written, Path(os.path.realpath(written)))):
        for path in (*reversed(target.parents), target):
            fault = fault_of(path, user, is_root=path == target)
            if fault:
                return path, fault
    return None


def fault_of(path: Path, user: int, *, is_root: bool) -> str:
    """Say through what another user could change what lies at a path; a store's own folders may not even be sticky."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):  # nothing is there: what will hold it is what counts
        return ""
    except OSError as error:
        return f"`{path}` cannot be examined ({error.strerror})"
    if status.st_uid not in (user, ROOT_USER):
        return f"`{path}` belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return ""
    if status.st_mode & OTHERS_WRITE and (is_root or not status.st_mode & stat.S_ISVTX):
        return f"others than its owner can write `{path}` (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _foreign(path: Path, owner: int, user: int, folder: Path) -> UntrustedArtifact:
    return UntrustedArtifact(
        f"`{path}` is not loaded: it belongs to user {owner}, and this process runs as user {user}",
        hint=f"have its owner run `piecework store sign --store {folder} --key FILE.key`, then load it with "
        f"`--trust signed --trusted-keys FILE.pub`",
        facts={"path": str(path), "owner": owner, "user": user, "policy": OWN},
    )


