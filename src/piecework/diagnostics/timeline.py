"""The timeline of a run: an observer that keeps every event with its thread, and writes the run as one file."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from piecework.diagnostics.counters import Counters
from piecework.diagnostics.process_start import process_start_ns
from piecework.diagnostics.run_file import Run, write_run
from piecework.events import Event, Phase, Ready


class Timeline:
    """Keep every event that it is given, with the name of its thread; `run()` gives them from the process's start on.

    `command` is what was typed, for the file. Where there is a command, time began with the process: its interpreter's
    start is then the first phase. A timeline made later in a process begins where it is made.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        now_ns = time.perf_counter_ns()
        self.command = tuple(command)
        self.start_ns = process_start_ns() if command else now_ns
        self.started_at = datetime.now(UTC) - timedelta(seconds=(now_ns - self.start_ns) / 1e9)
        self.events: list[Event] = []
        self.threads: dict[tuple[int, int], str] = {}
        self.counters = Counters()
        self.facts: dict[str, Any] = {}
        if command:
            self(Phase(name="interpreter", start_ns=self.start_ns, end_ns=now_ns))

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.counters(event)
        # An observer is called in the thread that it is told of, but for events of other processes.
        place = (event.process, event.thread)
        if place not in self.threads:
            is_here = event.thread == threading.get_native_id()
            self.threads[place] = threading.current_thread().name if is_here else f"thread {event.thread}"

    def run(self) -> Run:
        """Return what happened until now."""
        wall_ns = time.perf_counter_ns() - self.start_ns
        kept = sorted(self.events, key=lambda event: (event.start_ns, -event.end_ns))
        ready = [event.end_ns - self.start_ns for event in kept if isinstance(event, Ready)]
        facts = {
            "command": list(self.command),
            "started_at": self.started_at.isoformat(timespec="milliseconds"),
            "process": os.getpid(),
            "versions": _versions(),
            "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "keys": [key for event in kept if isinstance(event, Ready) for key in event.keys],
            "counters": self.counters.as_dict(),
            **self.facts,
        }
        return Run([self._plain(event) for event in kept], wall_ns, max(ready, default=0), facts, dict(self.threads))

    def write(self, path: str | Path) -> Run:
        """Write what happened until now to a file that Perfetto opens, and return it."""
        run = self.run()
        write_run(run, path)
        return run

    def _plain(self, event: Event) -> Mapping[str, Any]:
        times = {"start_ns": event.start_ns - self.start_ns, "end_ns": event.end_ns - self.start_ns}
        return {**event.as_dict(), **times}


def _versions() -> dict[str, str]:
    """Return the releases of what is loaded; nothing is imported for it."""
    found = {"python": platform.python_version()}
    for name in ("piecework", "torch", "transformers", "triton"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
