"""Kernels as files that the dynamic linker opens: the blob itself where that is safe, a file in memory elsewhere."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from threading import Lock

from piecework.errors import StoreError

NO_EXEC = getattr(os, "ST_NOEXEC", 8)


class MemoryKernels:
    """Hand out verified bytes as files in memory, for a store without a folder or in a folder that others write.

    The descriptors stay open for the life of the process: the linker knows a library by its path, and would take a
    number that is used again for the library it loaded before.
    """

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._lock = Lock()

    def path_of(self, digest: str, data: bytes) -> Path:
        """Return a path to a file in memory that holds `data`, which has the digest `digest`."""
        with self._lock:
            if digest not in self._paths:
                self._paths[digest] = _make_file(digest, data)
            return self._paths[digest]


def _make_file(digest: str, data: bytes) -> Path:
    try:
        descriptor = os.memfd_create(digest[:16], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise StoreError(
            f"kernel `{digest[:12]}` cannot be loaded: this system gives no files in memory ({error})",
            hint="use a store in a folder that only you can write: `--store DIR`",
        ) from error
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return Path(f"/proc/self/fd/{descriptor}")


def check_executable(path: Path) -> None:
    """Raise if the filesystem that holds a kernel is mounted so that nothing on it may run."""
    if os.statvfs(path).f_flag & NO_EXEC:
        raise StoreError(
            f"kernel `{path}` cannot be loaded: its filesystem is mounted `noexec`",
            hint="put the store on a filesystem that allows running code: `--store DIR` or `PIECEWORK_STORE=DIR`",
            facts={"path": str(path)},
        )
