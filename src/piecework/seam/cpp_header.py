"""The header of all C++ kernels, precompiled once for a build: begun beside the trace, so that nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from piecework.span_events import sub_phase
from piecework.spans import observed_by

_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
# What is traced sooner has few pieces, for which the header does not pay: it is dropped before it was begun.
_HEAD_START_S = 0.5


class CppBuildError(Exception):
    """A C++ compiler refused a source; the text is what it printed."""


class CppHeaders:
    """Precompiled headers by the command line that builds with them; gone with the last who uses them."""

    def __init__(self) -> None:
        self._made: dict[str, _Header] = {}
        self._users = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep for the block what is made in it."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                is_last = self._users == 0
            if is_last:
                self.drop()

    def begin(self, command: str, parent: str | None, observer: Any) -> None:
        """Begin a header in a thread of its own, a moment from now or at `hurry`; not if `drop` comes first."""
        header = _Header(parent)
        with self._lock:
            if self._made.setdefault(command, header) is not header:
                return

        def work() -> None:
            with observed_by(observer):
                header.make(command, after_s=_HEAD_START_S)

        threading.Thread(target=work, name="piecework-header", daemon=True).start()

    def hurry(self) -> None:
        """Let what was begun wait no longer."""
        with self._lock:
            for header in self._made.values():
                header.is_wanted.set()

    def get(self, command: str, parent: str | None) -> Path:
        """Return the header of a command: made here, or waited for where another thread makes it."""
        with self._lock:
            found = self._made.get(command)
            header = self._made[command] = found or _Header(parent)
        if found is None:
            header.make(command)
        elif not header.made.done():
            header.is_wanted.set()
            with sub_phase("wait", "the precompiled header"):
                return header.made.result()
        return header.made.result()

    def drop(self) -> None:
        """End what is being made, and remove what was."""
        with self._lock:
            dropped = list(self._made.values())
            self._made.clear()
        for header in dropped:
            header.drop()


class _Header:
    """One header in the making: `made` has its path, or why there is none."""

    def __init__(self, parent: str | None) -> None:
        self.made: Future[Path] = Future()
        self.is_wanted = threading.Event()
        self._parent = parent
        self._place: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._is_dropped = False
        self._lock = threading.Lock()

    def make(self, command: str, *, after_s: float = 0.0) -> None:
        """Precompile it; what goes wrong is told to who asks for it."""
        try:
            if after_s:
                self.is_wanted.wait(after_s)
            self.made.set_result(self._precompile(command))
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is raised where the header is asked for
            self.made.set_exception(error)

    def drop(self) -> None:
        """End the compiler if it is at work, and remove what it wrote."""
        with self._lock:
            self._is_dropped = True
            if self._process is not None and self._process.poll() is None:
                # The driver and the compiler that it runs are a group of their own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        self.is_wanted.set()
        with contextlib.suppress(Exception):
            self.made.result()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def _precompile(self, command: str) -> Path:
        words = [word for word in command_words(command, "prefix.h", "prefix.h.gch") if word != "-shared"]
        words = [word for word in words if word[:2] != "-l" and not word.startswith("-Wl,")]
        with self._lock:
            if self._is_dropped:
                raise CppBuildError("it was dropped before it was begun")
            self._place = place = Path(tempfile.mkdtemp(prefix="piecework-header-", dir=self._parent))
            (place / "prefix.h").write_text(_HEADER)
            began = subprocess.Popen(
                [*words, "-x", "c++-header"],
                cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                process_group=0,
            )  # fmt: skip
            self._process = began
        with sub_phase("C++", f"{Path(words[0]).name} c++-header"):
            printed, _ = began.communicate()
        if began.returncode:
            raise CppBuildError(printed or f"{words[0]} ended with {began.returncode}")
        return place / "prefix.h"


def command_words(command: str, source: str, output: str) -> list[str]:
    """Return a command line's words, with these files for `SOURCE` and `OUTPUT`."""
    words = []
    for word in shlex.split(command):
        name = Path(word).name
        words.append(source if name == "SOURCE" else output if name.startswith("OUTPUT") else word)
    return words
