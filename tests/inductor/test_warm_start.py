"""A warm start compiles nothing: in a fresh process, without a compiler on the path, from a store it may not write."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from toy_box import Process, Started, run_starts, snapshot, write_package

OPTIONS = {"compiler": "inductor", "size_one": False}
LAYERS = {"config": {"layers": 8}}
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "triton", "sympy", "transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def cold(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Process]:
    """A store that a process with a compiler filled."""
    store = tmp_path_factory.mktemp("cold") / "store"
    scratch = tmp_path_factory.mktemp("scratch")
    return store, run_starts(folder, store, [LAYERS], options=OPTIONS, TMPDIR=str(scratch))


@pytest.fixture
def locked(cold: tuple[Path, Process]) -> Iterator[Path]:
    """The same store, in which nothing may be written."""
    store = cold[0]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [store, *store.rglob("*")]}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    yield store
    for path, mode in modes.items():
        path.chmod(mode)


def test_a_cold_start_compiles_and_is_right(cold: tuple[Path, Process]) -> None:
    """So that the next test would see a compiler if there were one to see."""
    (start,) = cold[1].starts
    assert len(start.compiled) == 3
    assert start.fall_backs == []
    assert start.difference < 1e-5
    assert any("g++" in program or "c++" in program or "clang" in program for program in cold[1].programs)
    assert {name for name in COMPILER if name in cold[1].modules} >= {"torch._dynamo", "torch._inductor", "sympy"}


def test_a_warm_start_compiles_nothing(cold: tuple[Path, Process], locked: Path, folder: Path, tmp_path: Path) -> None:
    key = cold[1].starts[0].key
    before = snapshot(locked)
    warm = run_starts(
        folder, locked, [{**LAYERS, "load": key}, LAYERS], options=OPTIONS, read_only=True, forbid=True,
        PATH="", HOME=str(tmp_path), TMPDIR=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )  # fmt: skip
    for start in warm.starts:
        assert_nothing_compiled(start, key)
    assert warm.starts[1].is_hit  # with a model object given; `load` is told the key and looks nothing up
    assert warm.programs == []
    assert [name for name in warm.modules if name.startswith(COMPILER)] == []
    assert snapshot(locked) == before
    assert not (tmp_path / "inductor").exists()


def test_one_of_the_two_processes_may_be_anywhere(cold: tuple[Path, Process], folder: Path, tmp_path: Path) -> None:
    """The store is read from another working folder under another hash seed, and may be written: still nothing is."""
    before = {name: kept for name, kept in snapshot(cold[0]).items() if name.startswith(("records", "blobs"))}
    assert before
    warm = run_starts(folder, cold[0], [LAYERS], options=OPTIONS, cwd=tmp_path, forbid=True, PYTHONHASHSEED="77")
    assert_nothing_compiled(warm.starts[0], cold[1].starts[0].key)
    assert warm.starts[0].is_hit
    after = {name: kept for name, kept in snapshot(cold[0]).items() if name.startswith(("records", "blobs"))}
    assert {name: kept[2] for name, kept in after.items()} == {name: kept[2] for name, kept in before.items()}


def assert_nothing_compiled(start: Started, key: str) -> None:
    """Hold a start to the record it should have found, and to right results."""
    assert start.key == key, start.reasons
    assert start.compiled == []
    assert not start.has_traced
    assert start.fall_backs == []
    assert start.loaded == 3
    assert start.difference < 1e-5
