"""What this machine and this installation can do, looked at one thing after another."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from piecework.diagnostics.findings import ABSENT, FAILS, UNTESTED, WORKS, Finding
from piecework.errors import PieceworkError
from piecework.store.kernels import NO_EXEC
from piecework.store.trust import find_open_folder

COMPILERS = ("c++", "g++", "clang++")
LIBRARIES = (
    ("safetensors", "reading weights", True),
    ("tokenizers", "reading prompts", True),
    ("transformers", "building models from Hugging Face folders on a cold start", False),
    ("pynacl", "signing and verifying records", False),
)


def examine(store: str) -> list[Finding]:
    """Look at everything, the store's folder included; nothing is compiled and nothing is left behind."""
    return [_python(), *_torch(), *_libraries(), _cpp_compiler(), *_store(store), _memory_files(), _gpu()]


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info >= (3, 14):
        return Finding("Python", UNTESTED, found, "the suite runs on 3.11 to 3.13")
    return Finding("Python", WORKS, found)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", FAILS, "not importable", f"{error}; install torch 2.11 to 2.14")
        return
    from piecework.seam.check import RELEASES, release_status, self_test

    state = release_status()
    tested = ", ".join(release for release, status in RELEASES.items() if status == "tested")
    reason = "" if state == "tested" else f"the suite runs on {tested}; this release was only read, or not even that"
    yield Finding("torch", WORKS if state == "tested" else UNTESTED, torch.__version__, reason)
    for what, needs_compiler in (("loading artifacts", False), ("compiling with Inductor", True)):
        missing = [f"{name} ({use})" for name, is_there, use in self_test(compiler=needs_compiler) if not is_there]
        found = "all private names of torch are there" if not missing else f"{len(missing)} private names are missing"
        yield Finding(what, FAILS if missing else WORKS, found, ", ".join(missing))


def _libraries() -> Iterator[Finding]:
    for name, use, is_needed in LIBRARIES:
        try:
            yield Finding(name, WORKS, version(name))
        except PackageNotFoundError:
            yield Finding(name, FAILS if is_needed else ABSENT, "not installed", f"it is used for {use}")


def _cpp_compiler() -> Finding:
    from piecework.env import read_variables

    named = read_variables(["CXX"]).get("CXX", "")
    path = next((found for name in (named, *COMPILERS) if name and (found := shutil.which(name))), None)
    if path is None:
        return Finding(
            "C++ compiler", FAILS, "none", "a cold start on a CPU needs one (g++ or clang++); a warm start does not"
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("C++ compiler", FAILS, path, f"it does not run: {error}")
    return Finding("C++ compiler", WORKS, f"{path}: {(done.stdout.splitlines() or ['?'])[0]}")


def _store(store: str) -> Iterator[Finding]:
    if store == "memory":
        yield Finding("store", WORKS, "memory: nothing is kept")
        return
    from piecework.store.disk import DiskStore

    folder = Path(store)
    try:
        DiskStore(folder).check_writable()
        yield Finding("store", WORKS, f"{folder} takes writes")
    except PieceworkError as error:
        yield Finding("store", FAILS, str(folder), f"{error.message}; {error.hint}")
        return
    fault = find_open_folder(folder, os.geteuid())
    if fault is not None:
        yield Finding("store's owner", FAILS, str(fault[0]), fault[1])
    if os.statvfs(folder).f_flag & NO_EXEC:
        reason = "its filesystem is mounted `noexec`, so that no kernel can be loaded; `--store` gives another"
        yield Finding("store's filesystem", FAILS, str(folder), reason)
    else:
        yield Finding("store's filesystem", WORKS, "code can be loaded from it")


def _memory_files() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("files in memory", ABSENT, "no", "a store that others can write, and `memory`, need them")
    try:
        os.close(os.memfd_create("piecework"))
    except OSError as error:
        return Finding("files in memory", ABSENT, "no", f"a store that others can write needs them: {error.strerror}")
    return Finding("files in memory", WORKS, "yes")


def _gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("GPU", ABSENT, "not looked for: there is no torch")
    if not torch.cuda.is_available():
        built = f"torch was built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'without CUDA'}"
        return Finding("GPU", ABSENT, "none", f"{built}; models run on the CPU")
    major, minor = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}"
    if (major, minor) != (9, 0):
        return Finding("GPU", UNTESTED, found, "the suite runs on sm_90")
    return Finding("GPU", WORKS, found)
