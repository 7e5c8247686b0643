"""Another C++ compiler makes other artifacts; the same one under another path makes none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from piecework.seam.toolchain import cpp_compiler
from toy_box import run_starts, write_package

OPTIONS = {"compiler": "inductor", "size_one": False}
SMALL = {"config": {"layers": 2}}
OTHER = """#!/bin/sh
case "$*" in *--version*) echo "g++ (Other) 99.1.0"; exit 0;; esac
exec {real} "$@"
"""


def real_compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("needs g++")
    return found


def script(path: Path, real: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OTHER.format(real=real))
    path.chmod(0o755)
    return str(path)


def test_a_compiler_is_known_by_what_it_is_and_not_by_where_it_lies(tmp_path: Path) -> None:
    real = real_compiler()
    named = cpp_compiler("")
    linked, copied = tmp_path / "linked", tmp_path / "a folder" / Path(real).resolve().name
    linked.symlink_to(real)
    copied.parent.mkdir()
    shutil.copy(Path(real).resolve(), copied)
    assert {cpp_compiler(each) for each in ("g++", real, str(linked), str(copied))} == {named}
    others = [script(tmp_path / place / "g++-other", real) for place in ("one", "two")]
    assert cpp_compiler(others[0]) == cpp_compiler(others[1]) != named
    wrappers = [script(tmp_path / place / "compile", real) for place in ("one", "two")]
    assert [cpp_compiler(each) for each in wrappers] == ["g++ (Other) 99.1.0"] * 2
    assert cpp_compiler(str(tmp_path / "absent")) == ""


@pytest.mark.slow
def test_a_changed_compiler_compiles_anew_and_a_moved_one_does_not(tmp_path: Path) -> None:
    real, store, folder = real_compiler(), tmp_path / "store", write_package(tmp_path / "code")
    (first,) = run_starts(folder, store, [SMALL], options=OPTIONS, TMPDIR=str(tmp_path)).starts
    assert first.compiled and not first.fall_backs
    moved = tmp_path / "elsewhere" / "g++"
    moved.parent.mkdir()
    moved.symlink_to(real)
    (same,) = run_starts(folder, store, [SMALL], options=OPTIONS, forbid=True, CXX=str(moved)).starts
    assert same.is_hit and same.key == first.key
    other = script(tmp_path / "bin" / "g++-other", real)
    (second,) = run_starts(folder, store, [SMALL], options=OPTIONS, TMPDIR=str(tmp_path), CXX=other).starts
    assert not second.is_hit and "the C++ compiler was" in second.reasons and "g++-other" in second.reasons
    assert not second.fall_backs and not second.reused
    assert len(second.compiled) == len(first.compiled) and not {*second.compiled} & {*first.compiled}
    again = run_starts(folder, store, [SMALL], options=OPTIONS, forbid=True, CXX=other)
    assert again.starts[0].is_hit and again.programs == []
