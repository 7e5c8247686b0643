"""Files of a store: opened without following links, written aside and renamed into place.

Every step goes from folder to folder by descriptor (`openat` with `O_NOFOLLOW`), so that a link put in place of a
folder or file of the store leads nowhere: it is damage, like any other thing that is not a plain file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from piecework.store.envelope import Damaged
from piecework.store.layout import QUARANTINE, STAGING, Parts, note_parts, record_parts, use_parts
from piecework.store.owner import current_owner

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe in place of an entry must not hang whoever opens it.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
QUIET_FLAG = getattr(os, "O_NOATIME", 0)
NOT_A_FOLDER = frozenset({errno.ELOOP, errno.ENOTDIR})
FILE_MODE, FOLDER_MODE, ROOT_MODE = 0o644, 0o755, 0o700

Step = Callable[[str], None]
See = Callable[[Path, os.stat_result], None]


def no_step(name: str) -> None:
    """Do nothing at a step of a write."""


def no_look(path: Path, status: os.stat_result) -> None:
    """Take a folder as it is."""


@contextmanager
def open_folder(root: Path, parts: Parts, see: See = no_look) -> Iterator[int]:
    """Open a folder below the root, link by link refused; FileNotFoundError where there is none.

    `see` is shown each folder on the way, as it was opened, and may raise.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(parts, 1):
            inner = os.open(part, FOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
            see(root.joinpath(*parts[:depth]), os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_file(
    root: Path, parts: Parts, *, quiet: bool = False, see: See = no_look
) -> Iterator[tuple[int, os.stat_result]]:
    """Open an entry for reading; `quiet` leaves its time of last access alone, `see` is shown the folders on the way.

    Raises FileNotFoundError where nothing is, `Damaged` where something other than a readable plain file is.
    """
    try:
        with open_folder(root, parts[:-1], see) as folder:
            descriptor = _open_quietly(parts[-1], folder) if quiet else os.open(parts[-1], READ_FLAGS, dir_fd=folder)
    except OSError as error:
        raise _translate(error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("a folder stands in its place" if stat.S_ISDIR(status.st_mode) else "it is not a plain file")
        yield descriptor, status
    finally:
        os.close(descriptor)


def _open_quietly(name: str, folder: int) -> int:
    try:
        return os.open(name, READ_FLAGS | QUIET_FLAG, dir_fd=folder)
    except PermissionError:  # only its owner may leave a file's time of access alone
        return os.open(name, READ_FLAGS, dir_fd=folder)


def _translate(error: OSError) -> Exception:
    """Tell what is amiss with an entry from what is amiss with this process; a stale handle means it was replaced."""
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return FileNotFoundError(errno.ENOENT, "no such entry")
    if error.errno in NOT_A_FOLDER:
        return Damaged("it is a link, or lies behind one, or behind what is no folder")
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return error
    return Damaged(f"it cannot be read ({error.strerror})")


def read_all(descriptor: int, size: int) -> bytes:
    """Read a file whose size was taken when it was opened; one that grew meanwhile is cut one byte later."""
    chunks, left = [], size + 1
    try:
        while left > 0 and (chunk := os.read(descriptor, min(left, 1 << 30))):
            chunks.append(chunk)
            left -= len(chunk)
    except OSError as error:
        raise _translate(error) from None
    return b"".join(chunks)


def digest_of(descriptor: int) -> str:
    """Return the SHA-256 of an open file without holding it in memory; a file may claim more than there is."""
    found, offset = hashlib.sha256(), 0
    try:
        while chunk := os.pread(descriptor, 1 << 20, offset):
            found.update(chunk)
            offset += len(chunk)
    except OSError as error:
        raise _translate(error) from None
    return found.hexdigest()


@contextmanager
def ensure_folder(root: Path, parts: Parts) -> Iterator[int]:
    """Open a folder below the root, made where it is missing; what is not a true folder is moved aside first."""
    make_root(root)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, part in enumerate(parts):
            inner = _enter(root, parts[: depth + 1], part, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(root: Path, parts: Parts, part: str, parent: int) -> int:
    for _ in range(3):
        try:
            return os.open(part, FOLDER_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(part, FOLDER_MODE, dir_fd=parent)
                _keep_for_owner(part, parent)
        except OSError as error:
            if error.errno not in NOT_A_FOLDER:
                raise
            set_aside(root, parts)
    return os.open(part, FOLDER_FLAGS, dir_fd=parent)


def _keep_for_owner(part: str, parent: int) -> None:
    """Let its owner into a folder that was made just now; a `umask` may have taken that away."""
    mode = os.stat(part, dir_fd=parent, follow_symlinks=False).st_mode
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(part, stat.S_IMODE(mode) | stat.S_IRWXU, dir_fd=parent)


def make_root(root: Path) -> None:
    """Make the store's folder, for its owner alone, with the folders above it: others' writing would be refused."""
    for folder in (*reversed(root.parents), root):
        if not folder.is_dir():
            with suppress(FileExistsError):
                os.mkdir(folder, ROOT_MODE)
                os.chmod(folder, ROOT_MODE)  # a `umask` may take from its owner what a store needs


def set_aside(root: Path, parts: Parts, seen: os.stat_result | None = None) -> bool:
    """Move what stands at `parts` into quarantine as it is; with `seen`, only if it still is that file.

    Another process may have written a good entry since this one read the damaged one.
    """
    stamp = f"{parts[-1]}.{secrets.token_hex(6)}"
    if parts == (QUARANTINE,):
        os.rename(root / QUARANTINE, root / stamp)
        return True
    try:
        with ensure_folder(root, (QUARANTINE,)) as quarantine, open_folder(root, parts[:-1]) as folder:
            now = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
            if seen is not None and (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino):
                return False
            os.rename(parts[-1], stamp, src_dir_fd=folder, dst_dir_fd=quarantine)
    except OSError as error:
        if error.errno in NOT_A_FOLDER or isinstance(error, FileNotFoundError):
            return False  # it is gone, or a folder above it is no folder: the next write moves that one aside
        raise
    return True


def publish(root: Path, parts: Parts, data: bytes, step: Step = no_step, *, sync_folder: bool = False) -> None:
    """Write a file aside, force it to the disk and rename it into place: nobody ever sees a part of it.

    `sync_folder` forces the new name to the disk as well and, where the filesystem keeps a journal, all the names given
    before it: enough to do once, for the record that comes last.
    """
    name = f"{current_owner().as_name()}.{secrets.token_hex(6)}"
    with ensure_folder(root, (STAGING,)) as staging, ensure_folder(root, parts[:-1]) as folder:
        step("open")
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE, dir_fd=staging)
        try:
            try:
                if not os.fstat(descriptor).st_mode & stat.S_IRUSR:  # a `umask` took it: nobody could ever read it
                    os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
                step("write")
                _write(descriptor, data[: len(data) // 2])
                step("write the rest")
                _write(descriptor, data[len(data) // 2 :])
                step("sync")
                _sync(descriptor)
            finally:
                os.close(descriptor)
            step("rename")
            _rename(root, parts, name, staging, folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=staging)
            raise
        if sync_folder:
            step("sync the folder")
            _sync(folder)
    step("done")


def _rename(root: Path, parts: Parts, name: str, staging: int, folder: int) -> None:
    try:
        os.rename(name, parts[-1], src_dir_fd=staging, dst_dir_fd=folder)
    except (IsADirectoryError, NotADirectoryError, FileExistsError):
        set_aside(root, parts)
        os.rename(name, parts[-1], src_dir_fd=staging, dst_dir_fd=folder)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network and FUSE filesystems cannot, least of all for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
            raise


def remove(root: Path, parts: Parts) -> bool:
    """Unlink an entry; tell whether there was one. Whoever has it open or mapped keeps it."""
    try:
        with open_folder(root, parts[:-1]) as folder:
            os.unlink(parts[-1], dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except IsADirectoryError:
        return set_aside(root, parts)
    return True


def last_use(root: Path, kind: str, key: str) -> float:
    """Return when a record was last written, read or noted as used, whichever is latest, in seconds since 1970."""
    record, note = os.lstat(root.joinpath(*record_parts(kind, key))), 0.0
    with suppress(OSError):
        note = os.lstat(root.joinpath(*use_parts(kind, key))).st_mtime
    return max(record.st_mtime, record.st_atime, note)


def remove_notes(root: Path, kind: str, key: str) -> None:
    """Delete the texts for people that lie beside a record."""
    parts = note_parts(kind, key)
    for name in list_folder(root, parts):
        remove(root, (*parts, name))
    with suppress(OSError), open_folder(root, parts[:-1]) as folder:
        os.rmdir(parts[-1], dir_fd=folder)


def list_folder(root: Path, parts: Parts) -> list[str]:
    """Return the names in a folder in order; none where there is no such folder."""
    try:
        with open_folder(root, parts) as folder:
            return sorted(os.listdir(folder))
    except OSError:
        return []
