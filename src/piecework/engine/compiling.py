"""The compile process, seen from the server: started, asked how far it is, and never waited for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

MODULE = "piecework.engine.compile_process"
Note = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What is compiled, into which folder: plain data that a process takes on a line.

    `threads` is how many CPU threads the kernels are built for, 0 for as many as the process finds; it works with one.
    """

    folder: str
    dtype: str
    device: str
    options: Mapping[str, Any]
    store: str
    trust: str = "own"
    variables: Mapping[str, str] = field(default_factory=dict)
    nice: int = 19
    threads: int = 0

    def line(self) -> bytes:
        """Write the job as the line that the process reads."""
        return json.dumps(vars(self)).encode() + b"\n"


class Compiling:
    """One run of the compile process. `done` of `total` artifacts are there; at the end there is a `key` or an `error`.

    `is_lost` says that it ended without a word: killed, or out of memory.
    """

    def __init__(self, job: Job, note: Note) -> None:
        self.done = 0
        self.total = 0
        self.key = ""
        self.error = ""
        self._note = note
        # -P: a folder that happens to be the working one is no place to import from.
        self._process = subprocess.Popen(
            [*_stand_back(job.nice), sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(job.line())
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone already, which its end tells
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it goes on; when it has ended, all that it said is here."""
        return self._reader.is_alive() or self._process.poll() is None

    @property
    def is_lost(self) -> bool:
        return not self.is_running and not self.key and not self.error

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        return self.error or f"the compile process ended with {how} and said nothing"

    def close(self) -> None:
        """End it now, if it has not."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass

    def _read(self, lines: IO[bytes]) -> None:
        try:
            for line in lines:
                self._take(line)
        except (OSError, ValueError):
            pass  # closed while it was read: nobody asks any more

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        self.done, self.total = said.get("done", self.done), said.get("total", self.total)
        self.key, self.error = said.get("key", self.key), said.get("error", self.error)
        if "note" in said:
            self._note(said["note"])


def _stand_back(nice: int) -> list[str]:
    """Return what starts a process at low priority from its first instruction: its imports are work as well."""
    return ["nice", "-n", str(nice)] if nice and shutil.which("nice") else []
