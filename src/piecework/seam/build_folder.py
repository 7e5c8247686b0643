"""The folder that the compiler writes its files to while anyone in the process builds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _PrivateFolder:
    """The compiler's folder: there while anyone in the process builds, shared by all who do, removed with the last.

    Where it lies is the process's environment, so two of them at a time cannot be.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def use(self, parent: str | None) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._open.enter_context(_folder(parent))
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._open.close()


_private = _PrivateFolder()


def private_folder(parent: str | None) -> contextlib.AbstractContextManager[None]:
    """Give the compiler an empty folder for its files under `parent` (the temp folder), and remove it afterwards.

    Pieces compiled inside one block share precompiled headers and equal kernels.
    """
    return _private.use(parent)


@contextlib.contextmanager
def _folder(parent: str | None) -> Iterator[None]:
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=parent):
        headers, locks = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR
        # By default precompiled headers lie in a folder of the temp folder that other users can make first.
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = f"{cache_dir()}/headers", f"{cache_dir()}/headers/locks"
        codecache._precompile_header.cache_clear()
        try:
            yield
        finally:
            codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = headers, locks
            codecache._precompile_header.cache_clear()
