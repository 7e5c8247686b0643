"""What do eight processes cost that start cold together on one store, and what does verification cost a warm start?

    .venv/bin/python benchmarks/store_processes.py --processes 8 --repetitions 2

All processes import and make their model first, then wait for one signal; the time runs from the signal to the last
first result. Each says what it traced and which artifacts it compiled. Then one process starts warm: the folder is
compared before and after, and the reads of that start are timed with verification and as plain reads of the same files.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from measure import MARK, print_reading, write_result

HERE = pathlib.Path(__file__).resolve().parent
CAVEATS = (
    "One thread a process. Imports and the making of the model are in no figure; what waits for them is the signal.",
    "The processes compete for two cores; one alone has both, for its C++ builds at least: lowering takes one.",
    "Verification is the difference between reading what a warm start reads through the store (owner, mode, length, "
    "digest, JSON) and plain reads of the same files, the least of 50 each, files in the page cache.",
)


def main() -> None:
    """Run the parent, or, with `--child`, one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "store_processes.json")
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments)
        return
    runs = []
    for repetition in range(arguments.repetitions):
        for count in (1, arguments.processes):
            runs.append({"processes": count, "repetition": repetition, **start_together(count, arguments)})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    alone, together = (
        min(run["total_s"] for run in runs if run["processes"] == count) for count in (1, arguments.processes)
    )
    write_result(
        arguments.output,
        question="What do processes cost that start cold together on one store, and what does verification cost",
        caveats=CAVEATS,
        body={
            "layers": arguments.layers,
            "compiler": arguments.compiler,
            "ratio": round(together / alone, 3),
            "runs": runs,
        },
    )
    print(f"{arguments.processes} processes {together:.2f} s, one {alone:.2f} s: {together / alone:.2f} times")


def start_together(count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start `count` cold processes at one signal, then one warm; return what they say together."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="processes-"))
    command = [sys.executable, __file__, "--child", str(folder), "--layers", str(arguments.layers)]
    command += ["--compiler", arguments.compiler]
    try:
        children = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(folder, number))
            for number in range(count)
        ]
        while len(list(folder.glob("ready-*"))) < count:
            if any(child.poll() is not None for child in children):
                raise SystemExit("a child ended before the signal")
            time.sleep(0.05)
        (folder / "go").write_text(repr(time.monotonic()))
        readings = [_reading(child) for child in children]
        warm = subprocess.Popen(
            [*command, "--warm"], stdout=subprocess.PIPE, text=True, env=_environment(folder, count)
        )
        compiled = collections.Counter(key for reading in readings for key in reading["compiled"])
        return {
            "total_s": round(max(reading["ended"] for reading in readings), 3),
            "each_s": sorted(round(reading["ended"], 3) for reading in readings),
            "traces": sum(reading["traces"] for reading in readings),
            "artifacts": len(compiled),
            "compiled_twice": sum(times > 1 for times in compiled.values()),
            "warm": _reading(warm),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reading(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = child.communicate(timeout=900)
    line = next((line for line in out.splitlines() if line.startswith(MARK)), None)
    if child.returncode or line is None:
        raise SystemExit(f"a child ended with {child.returncode}: {out[-2000:]}")
    reading: dict[str, Any] = json.loads(line[len(MARK) :])
    return reading


def _environment(folder: pathlib.Path, number: int) -> dict[str, str]:
    own = folder / f"own-{number}"
    (own / "tmp").mkdir(parents=True)
    return {
        "PATH": os.environ["PATH"], "HOME": str(own), "TMPDIR": str(own / "tmp"), "NUMBER": str(number),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip


def run_child(arguments: argparse.Namespace) -> None:
    """Import, make the model, wait for the signal, start; say what was done."""
    import torch

    import piecework as pw
    import piecework.api.programs  # imports are not what is timed
    import piecework.stages.compile
    from peers.piecework_layer import DYNAMIC
    from piecework import events
    from toy_llama import ToyLlama, ToyShape, fill_weights

    folder = arguments.child
    model = ToyLlama(ToyShape(layers=arguments.layers)).eval()
    fill_weights(model)
    inputs = torch.zeros(2, dtype=torch.int64), torch.arange(2)
    seen = events.Recorder()
    options = pw.CompileOptions(compiler=arguments.compiler, ranges=((2, 8192),))
    open_store = pw.DiskStore
    if not arguments.warm:
        (folder / f"ready-{os.environ['NUMBER']}").touch()
        while not (folder / "go").exists() or not (folder / "go").read_text():
            time.sleep(0.01)
    began = time.monotonic() if arguments.warm else float((folder / "go").read_text())
    before = snapshot(folder / "store") if arguments.warm else {}
    store = open_store(folder / "store", observer=seen)
    program = pw.compile(model, inputs, dynamic=DYNAMIC, options=options, store=store, observer=seen)
    with torch.no_grad():
        program(*inputs)
    reading: dict[str, Any] = {
        "ended": time.monotonic() - began,
        "traces": sum(event.name == "trace" for event in seen.of(events.Phase)),
        "compiled": [event.key for event in seen.of(events.ArtifactCompiled)],
    }
    if arguments.warm:
        read = [(event.kind, event.name) for event in seen.of(events.StoreRead)]
        reading |= {
            "start_s": round(reading.pop("ended"), 4),
            "files_changed": sum(before.get(name) != now for name, now in snapshot(folder / "store").items()),
            "artifact_bytes": sum(event.size_bytes for event in seen.of(events.ArtifactLoaded)),
            **verification(folder / "store", read),
        }
    print_reading(reading)


def verification(folder: pathlib.Path, read: list[tuple[str, str]]) -> dict[str, Any]:
    """Time the reads of a start through a store, and plain reads of the same files."""
    import piecework as pw
    from piecework.store.layout import blob_parts, record_parts

    parts = [blob_parts(name) if kind == "blob" else record_parts(kind, name) for kind, name in read]
    paths = [folder.joinpath(*each) for each in parts]

    def through_store() -> None:
        store = pw.DiskStore(folder)
        for kind, name in read:
            if kind == "blob":
                store.read_blob(name)
            else:
                store.read_record(kind, name)

    def plain() -> None:
        for path in paths:
            json.loads(path.read_bytes().partition(b"\n")[2]) if path.suffix == ".record" else path.read_bytes()

    verified_ms, plain_ms = least_ms(through_store), least_ms(plain)
    return {
        "reads": len(read), "read_bytes": sum(path.stat().st_size for path in paths), "verified_ms": verified_ms,
        "plain_ms": plain_ms, "verification_ms": round(verified_ms - plain_ms, 3),
    }  # fmt: skip


def least_ms(call: Any, times: int = 50) -> float:
    """Return the least of so many timings, in milliseconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return round(min(found) * 1e3, 3)


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time of change and digest of everything in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


if __name__ == "__main__":
    main()
