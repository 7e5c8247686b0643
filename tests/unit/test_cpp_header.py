"""The header of all kernels: one compiler call beside whatever else goes on, ended where nobody needs it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from piecework.events import Recorder
from piecework.seam.cpp_header import CppBuildError, CppHeaders
from piecework.span_events import SubPhase
from piecework.spans import spanning

COMPILER = """
import os, subprocess, sys, time
from pathlib import Path
log, mode = Path(sys.argv[1]), sys.argv[2]
with log.open("a") as file:
    file.write(f"{os.getpid()} {' '.join(sys.argv[3:])}\\n")
if mode == "refuse":
    sys.exit("prefix.h:1: no such instruction")
if mode == "hang":
    with log.open("a") as file:
        file.write(f"{subprocess.Popen(['sleep', '600']).pid} the compiler proper\\n")
    time.sleep(600)
Path("prefix.h.gch").write_text(Path("prefix.h").read_text())
"""


def command(folder: Path, mode: str = "make") -> str:
    """Return the command line of a compiler that notes each call in `calls`."""
    (folder / "compiler.py").write_text(COMPILER)
    calls = folder / "calls"
    calls.touch()
    return f"{sys.executable} {folder}/compiler.py {calls} {mode} SOURCE -shared -lm -Wl,-s -O3 -o OUTPUT.so"


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def begun(folder: Path, lines: int) -> list[int]:
    """Wait until that many lines are noted; return the processes that wrote them."""
    while len(calls(folder)) < lines:
        time.sleep(0.01)
    return [int(line.split()[0]) for line in calls(folder)]


def test_who_asks_is_given_what_was_begun_and_the_call_is_a_span_of_its_own(tmp_path: Path) -> None:
    headers, seen, line = CppHeaders(), Recorder(), command(tmp_path)
    with headers.using():
        headers.begin(line, str(tmp_path), seen)
        headers.begin(line, str(tmp_path), seen)
        found: list[Path] = []
        others = [threading.Thread(target=lambda: found.append(headers.get(line, "nowhere"))) for _ in range(3)]
        with spanning(seen):
            for other in others:
                other.start()
            found.append(headers.get(line, "nowhere"))
        for other in others:
            other.join()
        assert len(found) == 4 and len(set(found)) == 1 and found[0].with_suffix(".h.gch").is_file()
        (call,) = calls(tmp_path)
        assert call.split(" ", 1)[1] == "prefix.h -O3 -o prefix.h.gch -x c++-header"
        with headers.using():
            pass
        assert found[0].is_file()
    assert not found[0].parent.exists()
    (compiled,) = [event for event in seen.of(SubPhase) if event.name == "C++"]
    assert (compiled.parent, compiled.detail) == (0, f"{Path(sys.executable).name} c++-header")
    assert compiled.thread != threading.get_native_id()
    for wait in (event for event in seen.of(SubPhase) if event.name == "wait"):
        assert wait.detail == "the precompiled header" and wait.start_ns < compiled.end_ns


def test_without_a_beginning_the_first_who_asks_makes_it(tmp_path: Path) -> None:
    headers, line = CppHeaders(), command(tmp_path)
    with headers.using():
        assert headers.get(line, str(tmp_path)) == headers.get(line, str(tmp_path))
        assert headers.get(line, str(tmp_path)) != headers.get(f"{line} -g", str(tmp_path))
    assert len(calls(tmp_path)) == 2


def test_what_is_dropped_before_its_turn_is_never_begun(tmp_path: Path) -> None:
    headers, line = CppHeaders(), command(tmp_path)
    with headers.using():
        headers.begin(line, str(tmp_path), None)
        headers.drop()
        assert calls(tmp_path) == []
        headers.begin(line, str(tmp_path), None)
        headers.hurry()
        assert headers.get(line, str(tmp_path)).is_file()
    assert len(calls(tmp_path)) == 1


def test_what_is_dropped_while_it_is_made_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    headers, line, place = CppHeaders(), command(tmp_path, "hang"), tmp_path / "headers"
    place.mkdir()
    with headers.using():
        headers.begin(line, str(place), None)
        headers.hurry()
        at_work = begun(tmp_path, 2)
        assert len(list(place.iterdir())) == 1
    assert list(place.iterdir()) == []
    for process in at_work:
        while is_running(process):
            time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_what_the_compiler_refuses_is_told_to_who_asks_each_time(tmp_path: Path) -> None:
    headers, line = CppHeaders(), command(tmp_path, "refuse")
    with headers.using():
        headers.begin(line, str(tmp_path), None)
        for _ in range(2):
            with pytest.raises(CppBuildError, match="no such instruction"):
                headers.get(line, str(tmp_path))
        with pytest.raises(CppBuildError, match="no such instruction"):
            headers.get(f"{line} -g", str(tmp_path))
        with pytest.raises(FileNotFoundError):
            headers.get("no-such-compiler SOURCE -o OUTPUT.so", str(tmp_path))
    assert len(calls(tmp_path)) == 2
