"""Begin to load torch's shared libraries while the interpreter does something else.

A good part of `import torch` is spent in the dynamic linker, which needs no interpreter: opened by a thread that holds
no interpreter lock, the libraries are in place when the import asks for them. Only Linux, and only libraries that know
nothing of Python; whatever is not found here is left to the import, which says what is wrong with it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

# In the order and with the visibility that torch's own import gives them.
_LIBRARIES = (("libtorch_global_deps.so", True), ("libtorch_cpu.so", False))


def preload_torch() -> None:
    """Start to load torch's libraries in a thread, unless torch is imported already."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    folder = torch_folder()
    paths = [(folder / "lib" / name, is_global) for name, is_global in _LIBRARIES] if folder is not None else []
    if paths and all(path.is_file() for path, _ in paths):
        at_work = threading.Event()
        threading.Thread(target=_open_all, args=(paths, at_work), daemon=True, name="preload").start()
        at_work.wait()  # what comes next may keep the lock, and the thread would never get as far as the linker


def torch_folder() -> Path | None:
    """Return where torch is installed, without importing it; None if it is not."""
    spec = find_spec("torch")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def _open_all(paths: list[tuple[Path, bool]], at_work: threading.Event) -> None:
    # Called as a foreign function, which gives the lock away; ctypes' own loading keeps it.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    at_work.set()
    for path, is_global in paths:
        if not dlopen(os.fsencode(path), os.RTLD_NOW | (os.RTLD_GLOBAL if is_global else 0)):
            return
