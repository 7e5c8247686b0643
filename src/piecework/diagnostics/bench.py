"""Compare two settings, or two commits, in one run whose readings are interleaved.

Each reading is a process of its own (`bench_child`). A machine that slows down for a minute slows both sides; ratios
are taken inside one run and nowhere else.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import piecework
from piecework.diagnostics import bench_child
from piecework.errors import OptionError, PieceworkError

# The source to measure goes first on the path, before what an installation put there.
_LAUNCH = "import sys, runpy; sys.path.insert(0, sys.argv.pop(1)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
UNITS = {"startup": "s", "dispatch": "us", "decode": "tokens/s"}
QUESTIONS = {
    "startup": "seconds from the start of a process to the first token",
    "dispatch": "microseconds of a step of one token as the host sees it; on a CPU its kernels are in it",
    "decode": "tokens a second once the first is out",
}


@dataclass(frozen=True)
class Side:
    """One side of a comparison: options that differ from the defaults, and the source to measure (empty: this one)."""

    name: str
    options: Mapping[str, Any]
    source: str = ""


@dataclass(frozen=True)
class Measure:
    """What is measured, and how often; a warm-up is thrown away, in each process and, for starts, before each side."""

    what: str
    model: str
    dtype: str = "auto"
    device: str = "cpu"
    prompt_ids: tuple[int, ...] = (1, 2, 3)
    repetitions: int = 3
    warmups: int = 1
    calls: int = 3
    tokens: int = 32
    is_cold: bool = False
    timeout_s: float = 1800.0


def compare(measure: Measure, sides: Sequence[Side], tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Take the readings of all sides in turn and return them with medians, least, ratios and the machine."""
    readings: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="piecework-bench-") as folder:
        stores = [Path(folder, f"store{number}") for number in range(len(sides))]
        if not measure.is_cold:
            for side, store in zip(sides, stores, strict=True):  # fills the store; thrown away
                _read(measure, side, store)
        for repetition in range(measure.repetitions):
            turn = repetition % len(sides)
            order = [*range(turn, len(sides)), *range(turn)]
            for number in order:
                if measure.is_cold:
                    shutil.rmtree(stores[number], ignore_errors=True)
                found = _read(measure, sides[number], stores[number])
                readings.append({"side": sides[number].name, "repetition": repetition, **found})
                tell(f"{sides[number].name}: {found['value']} {UNITS[measure.what]}")
    return _result(measure, sides, readings)


def _result(measure: Measure, sides: Sequence[Side], readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    table = {}
    for side in sides:
        values = [reading["value"] for reading in readings if reading["side"] == side.name]
        best = max(values) if measure.what == "decode" else min(values)
        table[side.name] = {"median": statistics.median(values), "best": best, "readings": len(values)}
    first, *others = (side.name for side in sides)
    ratios = {
        f"{name}/{first}": {kind: round(table[name][kind] / table[first][kind], 4) for kind in ("median", "best")}
        for name in others
    }
    start = "an empty store" if measure.is_cold else "a filled store"
    calls = "" if measure.what == "startup" else f", {measure.calls} timed after {measure.warmups} thrown away in each"
    return {
        "question": QUESTIONS[measure.what],
        "unit": UNITS[measure.what],
        "how": f"{measure.repetitions} processes a side, in turn, from {start}{calls}; medians of those",
        "sides": {side.name: {"options": dict(side.options), "source": side.source or "this one"} for side in sides},
        "table": table,
        "ratios": ratios,
        "readings": list(readings),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {"piecework": piecework.__version__},
    }


def _read(measure: Measure, side: Side, store: Path) -> dict[str, Any]:
    given = {
        "what": measure.what, "model": measure.model, "dtype": measure.dtype, "device": measure.device,
        "options": dict(side.options), "store": str(store),
        "prompt_ids": list(measure.prompt_ids), "warmups": measure.warmups, "calls": measure.calls,
        "tokens": measure.tokens, "spawned_at": time.monotonic(),
    }  # fmt: skip
    source = side.source or str(Path(piecework.__file__).parents[1])
    command = [sys.executable, "-c", _LAUNCH, source, str(Path(bench_child.__file__)), json.dumps(given)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=measure.timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise PieceworkError(
            f"a reading of `{side.name}` took more than {measure.timeout_s:.0f} s", hint="measure a smaller model"
        ) from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(bench_child.MARK)]
    if not lines:
        told = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it printed nothing"]
        raise PieceworkError(
            f"a reading of `{side.name}` failed: {told[0]}", hint="run the same settings by `piecework generate`",
            facts={"side": side.name, "stderr": done.stderr[-4000:]},
        )  # fmt: skip
    reading: dict[str, Any] = json.loads(lines[-1].removeprefix(bench_child.MARK))
    return reading


@contextmanager
def source_of(commit: str) -> Iterator[str]:
    """Give the `src` folder of another commit of the checkout that this package runs from."""
    place = Path(piecework.__file__).resolve().parent
    if not (place.parent.name == "src" and (place.parents[1] / ".git").exists()):
        raise OptionError(
            f"commit `{commit}` cannot be measured: this package does not run from a checkout",
            hint="clone the repository, and run `piecework bench` from it",
        )
    done = subprocess.run(
        ["git", "-C", str(place.parents[1]), "archive", commit, "src"], capture_output=True, check=False
    )
    if done.returncode:
        raise OptionError(f"there is no commit `{commit}`", hint=done.stderr.decode(errors="replace").strip())
    with tempfile.TemporaryDirectory(prefix="piecework-commit-") as folder:
        with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield str(Path(folder, "src"))
