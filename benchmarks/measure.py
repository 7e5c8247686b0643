"""Measure in fresh processes, on a yardstick, and keep what was measured with the machine it was measured on.

A benchmark's parent process starts one child for each reading (`fresh_process`); a child times itself and prints one
line (`print_reading`). Microseconds mean little from one machine to the next, so every child also times the yardstick:
1,000 calls of `torch.mm(out=)` on 2 by 16 and 16 by 16, which is next to nothing but the host's own cost of a call.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
MARK = "READING "
SPAWNED_AT = "MEASURE_SPAWNED_AT"


@dataclasses.dataclass(frozen=True)
class CallTimes:
    """Hold what one call costs, in microseconds: the least and the median block mean, and how many were timed."""

    least_us: float
    median_us: float
    calls: int


def time_calls(call: Callable[[], object], *, blocks: int = 1000, block_s: float = 0.002) -> CallTimes:
    """Time blocks of calls, each block as many calls as fit into `block_s`, after a block that is thrown away.

    Short blocks, below a scheduler's slice, so that many of them are not interrupted on a shared machine.
    """
    count, means = 1, []
    for block in range(-1, blocks):
        if block < 0:
            count = max(1, int(block_s / max(_mean_s(call, 20), 1e-9)))
        mean = _mean_s(call, count)
        if block >= 0:
            means.append(mean * 1e6)
    return CallTimes(round(min(means), 2), round(statistics.median(means), 2), count * blocks)


def _mean_s(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def yardstick_ms() -> float:
    """Time 1,000 calls of `torch.mm(out=)` on 2 by 16 and 16 by 16; return the least of nine, in milliseconds."""
    import torch

    with torch.no_grad():
        left, right, out = torch.randn(2, 16), torch.randn(16, 16), torch.empty(2, 16)
        return round(min(_mean_s(lambda: torch.mm(left, right, out=out), 1000) for _ in range(9)) * 1e6, 3)


@dataclasses.dataclass(frozen=True)
class Elapsed:
    """Hold wall seconds, and the processor seconds of this process and of its finished children (compilers).

    Processor seconds hardly notice the neighbours on a shared machine; wall seconds are what a user waits for.
    """

    wall_s: float
    own_s: float
    children_s: float

    @classmethod
    def now(cls) -> Elapsed:
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return cls(time.perf_counter(), own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime)

    def until_now(self) -> Elapsed:
        """Return what has passed since `self` was taken by `now`."""
        end = Elapsed.now()
        return Elapsed(end.wall_s - self.wall_s, end.own_s - self.own_s, end.children_s - self.children_s)


def since_spawned_s() -> float:
    """Say how long ago `fresh_process` started this process: the monotonic clock is one for the whole machine."""
    return time.monotonic() - float(os.environ[SPAWNED_AT])


def print_reading(reading: Mapping[str, Any]) -> None:
    """Print one reading as the line that `fresh_process` looks for."""
    print(MARK + json.dumps(reading), flush=True)


def fresh_process(
    command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float = 600.0
) -> dict[str, Any]:
    """Run one child and return its reading, or `{"error": …}`.

    The child sees only what a process needs to run, and `environment`: a variable that a shell happens to hold
    (a cache folder, a compiler flag) must not decide a reading.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "TZ") if name in os.environ}
    variables = {**kept, **environment, SPAWNED_AT: repr(time.monotonic())}
    try:
        done = subprocess.run(
            list(command), env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        return {"error": f"exit status {done.returncode}: {(done.stderr or done.stdout)[-2000:].strip()}"}
    reading: dict[str, Any] = json.loads(lines[-1][len(MARK) :])
    return reading


def machine() -> dict[str, Any]:
    """Name the machine: processor, cores that this process may use, memory, load, accelerator."""
    model = platform.processor() or platform.machine()
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "compiler": _first_line(["g++", "--version"]),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Look up the installed versions of `packages`; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> dict[str, Any]:
    """Name the commit that was measured, and say whether tracked files differ from it."""
    git = ["git", "-C", str(REPOSITORY)]
    return {
        "commit": _first_line([*git, "rev-parse", "HEAD"]) or None,
        "changed": bool(_first_line([*git, "status", "--porcelain", "--untracked-files=no"])),
    }


def write_result(path: pathlib.Path, *, question: str, caveats: Sequence[str], body: Mapping[str, Any]) -> None:
    """Write one benchmark's result as JSON: the question, the caveats first, then where, what and how much."""
    result = {
        "question": question,
        "caveats": list(caveats),
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Folders by their names alone: where they lie is this machine's.
        "command": " ".join(
            pathlib.Path(each).name if each.startswith("/") or not index else each
            for index, each in enumerate(sys.argv)
        ),
        "machine": machine(),
        **commit(),
        **body,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else ""
