"""Children that work on a store: as another user, killed at a step, or all at once; forked, so hundreds are cheap."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child and return its number; it ends with 0 unless `work` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest-xdist's threads hold no lock that `work` needs
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait(child: int, timeout_s: float = 60.0) -> int:
    """Return how a child ended: its exit status, or minus the signal that killed it; kill it when it hangs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"child {child} hung")


def kill(child: int) -> None:
    """Kill a child at once and forget it."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextmanager
def open_folder() -> Iterator[Path]:
    """Give a temporary folder that other users can go through, wherever `TMPDIR` points (it is often private)."""
    places = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/tmp"))
    place = next(p for p in places if all(_lets_others_through(part) for part in (p, *p.resolve().parents)))
    with tempfile.TemporaryDirectory(dir=place) as name:
        os.chmod(name, 0o755)
        yield Path(name)


def _lets_others_through(folder: Path) -> bool:
    return folder.is_dir() and bool(folder.stat().st_mode & stat.S_IXOTH)


def run_as(user: int, work: Callable[[], Any]) -> Any:
    """Run `work` in a child that is another user, and return what it returned as JSON; raise what it raised."""
    read_end, write_end = os.pipe()

    def answer() -> None:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            os.write(write_end, json.dumps({"value": work()}).encode())
        except BaseException:  # noqa: BLE001
            os.write(write_end, json.dumps({"error": traceback.format_exc()[-3000:]}).encode())

    child = fork(answer)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        said = json.loads(file.read() or b'{"error": "the child died"}')
    wait(child)
    if "error" in said:
        raise AssertionError(said["error"])
    return said["value"]


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    """Return when a file is there."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.001)


def append(path: Path, line: str) -> None:
    """Add a line to a log that many processes write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def refuse_locks(descriptor: int, operation: int) -> None:
    """Be a filesystem that takes no locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
