"""Threads that make calls for those who may give up waiting; nobody waits for them for long when the process ends.

Plain threads and blocking calls: where the process ends while native code is about to come back into Python, Python
ends that thread in the middle of it, and the process aborts. What runs in threads of the library's own cannot be seen;
what runs here can, and is given a moment at the end.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

Task = tuple["Future[Any]", Callable[[], Any]]


class Crew:
    """At most `size` daemon threads, started as they are needed; at exit those at work are given `patience_s`."""

    def __init__(self, size: int, patience_s: float) -> None:
        self._size, self._patience_s = size, patience_s
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._threads = self._unfinished = 0
        self._lock = threading.Lock()
        atexit.register(self.settle)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have a call made by the next thread that is free; it is not made if the future is cancelled before."""
        future: Future[Any] = Future()
        with self._lock:
            self._unfinished += 1
            if self._threads < min(self._size, self._unfinished):
                self._threads += 1
                threading.Thread(target=self._work, name="piecework-remote", daemon=True).start()
        self._tasks.put((future, call))
        return future

    def settle(self) -> bool:
        """Wait until nothing is at work, for `patience_s` at most; tell whether that is so."""
        deadline = time.monotonic() + self._patience_s
        while self._unfinished and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._unfinished

    def _work(self) -> None:
        while True:
            future, call = self._tasks.get()
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call())
                    except BaseException as error:  # noqa: BLE001  handed on to whoever asked
                        future.set_exception(error)
            finally:
                with self._lock:
                    self._unfinished -= 1
                del future, call  # what it gave is its asker's alone
