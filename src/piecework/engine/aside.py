"""Work beside the steps: in a thread that stands back, on cores that the steps leave to it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

Result = TypeVar("Result")
NICE = 10


@contextmanager
def fewer_threads() -> Iterator[None]:
    """Leave a quarter of the cores, one at least, to what is done beside the steps.

    A step whose threads wait for one that shares its core takes many times as long. The threads are the caller's own.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - max(1, before // 4)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def aside(work: Callable[[], Result]) -> Generator[None, None, Result]:
    """Do work in a thread of its own, and give way until it is done; raise what it raises."""
    found: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        _stand_back()
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is waited for
            failures.append(error)

    with fewer_threads():
        thread = threading.Thread(target=run, name="piecework-aside", daemon=True)
        thread.start()
        while thread.is_alive():
            yield
    if failures:
        raise failures[0]
    return found[0]


def _stand_back() -> None:
    """Take one core, and that only when nobody else wants it, where threads have a priority of their own."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
