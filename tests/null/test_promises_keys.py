"""What is found again and what is not: the same code with other numbers, the same numbers elsewhere, other code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from toy_box import Process, run_starts, write_package

# Each differs from the first in one thing that decides what the model computes, or what serves it.
OTHER_NUMBERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "an int used as a size": {"config": {"width": 24}},
    "bias": {"config": {"bias": True}},
    "layers": {"config": {"layers": 3}},
    "an epsilon": {"config": {"epsilon": 1e-3}},
    "a number that a layer holds": {"patch": {"model.layers.2.feed_forward.scale": 2}},
    "the split list": {"options": {"split_ops": ["toybox::second"]}},
    "the split list, replaced": {"options": {"split_ops_only": ["toybox::second"]}},
    "an option": {"options": {"merge_consecutive": False}},
    "ranges": {"options": {"ranges": [[1, 32], [33, 64]]}},
    "the compiler": {"options": {"compiler": "aot_eager"}},
    "a function that was patched": {
        "patch": {"toybox.mlp.gate": "def gate(left, right):\n    return torch.relu(left) * right\n"}
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def first(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Process]:
    """A store that one process filled with every variant."""
    store = tmp_path_factory.mktemp("first") / "store"
    return store, run_starts(folder, store, list(OTHER_NUMBERS.values()), PYTHONHASHSEED="1")


def test_another_number_is_another_program(first: tuple[Path, Process]) -> None:
    """Each variant is traced: none is served by the record of one before it."""
    for name, start in zip(OTHER_NUMBERS, first[1].starts, strict=True):
        assert not start.is_hit, name
        assert start.has_traced, name
        assert start.difference < 1e-5, name
    assert len({start.key for start in first[1].starts}) == len(OTHER_NUMBERS)


def test_the_second_time_each_finds_its_own(
    first: tuple[Path, Process], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Third and fourth of A, B, A, B: another process, elsewhere, under another hash seed; the store was moved."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    store = elsewhere / "moved"
    shutil.copytree(first[0], store)
    shutil.copytree(folder, elsewhere / "code")
    cwd = elsewhere / "somewhere"
    cwd.mkdir()
    again = run_starts(
        elsewhere / "code", store, list(OTHER_NUMBERS.values()), cwd=cwd, read_only=True, forbid=True,
        HOME=str(elsewhere), PYTHONHASHSEED="2", UNRELATED="1", USER="nobody", XDG_CACHE_HOME=str(elsewhere),
    )  # fmt: skip
    for name, before, now in zip(OTHER_NUMBERS, first[1].starts, again.starts, strict=True):
        assert now.is_hit, f"{name}: {now.reasons}"
        assert now.key == before.key, name
        assert now.compiled == [], name
        assert not now.has_traced, name
        assert now.difference < 1e-5, name
    assert again.programs == []


def test_no_path_of_this_machine_is_stored(first: tuple[Path, Process], folder: Path) -> None:
    words = [str(folder), str(first[0]), os.path.expanduser("~") + "/", os.getcwd()]
    files = [path for path in first[0].rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_bytes()
        for word in words:
            assert word.encode() not in data, f"{path.name} holds {word}"


def test_pieces_are_shared_between_programs(first: tuple[Path, Process]) -> None:
    """What a change leaves alone is not compiled again: fewer layers have the same pieces."""
    by_name = dict(zip(OTHER_NUMBERS, first[1].starts, strict=True))
    assert by_name["as it is"].compiled
    assert by_name["layers"].compiled == []
    assert set(by_name["layers"].reused) == set(by_name["as it is"].compiled)


def test_a_flag_of_a_module_is_seen(folder: Path, tmp_path: Path) -> None:
    """A flag that chooses another operator, set without any file having changed: a miss, and then a hit."""
    flagged = {"patch": {"toybox.gates.USE_GELU": True}}
    process = run_starts(folder, tmp_path / "store", [{}, flagged, flagged])
    assert [start.is_hit for start in process.starts] == [False, False, True]
    assert "USE_GELU" in process.starts[1].reasons
    assert all(start.difference < 1e-5 for start in process.starts)


def test_an_attribute_of_the_model_is_seen(folder: Path, tmp_path: Path) -> None:
    changed = {"patch": {"model.layers.5.norm.epsilon": 0.5}}
    process = run_starts(folder, tmp_path / "store", [{}, changed, {}, changed])
    assert [start.is_hit for start in process.starts] == [False, False, True, True]
    assert "model.layers.5.norm.epsilon" in process.starts[1].reasons
    assert "0.5" in process.starts[1].reasons
    assert all(start.difference < 1e-5 for start in process.starts)


def test_options_are_frozen() -> None:
    """What is appended to a list after it was handed in does not come in by the back door."""
    import dataclasses

    import piecework as pw

    wanted = ["toybox::mix"]
    options = pw.CompileOptions(split_ops=wanted)  # type: ignore[arg-type]
    before = options.keyed()
    wanted.append("toybox::second")
    assert options.split_ops == ("toybox::mix",)
    assert options.keyed() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.split_ops = ("toybox::second",)  # type: ignore[misc]
