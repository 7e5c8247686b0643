"""Ranks that find different things in their stores start from one program; one that fails ends all, and none hangs."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import piecework as pw
from parallel.programs import options, tell_each
from parallel.several_ranks import on_ranks
from piecework.api.folder import build_folder
from tiny_models import tiny_folder

SEED = 20_261_130


def start(folder: Path, stores: list[Path]) -> list[dict[str, Any]]:
    return [found[folder.name] for found in on_ranks(2, tell_each, [folder], stores, 2, "eager", {})]


def spoil(stores: list[Path], chance: random.Random) -> str:
    """Delete one rank's store, its records, or one of its blobs."""
    store = chance.choice(stores)
    if not (store / "blobs").is_dir():
        return "nothing"
    what = chance.choice(["all", "records", "blob"])
    if what == "all":
        shutil.rmtree(store)
    elif what == "records":
        shutil.rmtree(store / "records")
    else:
        blobs = sorted(path for path in (store / "blobs").rglob("*") if path.is_file())
        chance.choice(blobs).unlink()
    return f"{what} of {store.name}"


def start_often(count: int, folder: Path, stores: list[Path]) -> list[tuple[str, dict[str, Any]]]:
    """Start again and again on this rank, rank 0 deleting something of one rank's before each."""
    import torch.distributed as dist

    chance = random.Random(SEED)
    found = [("nothing", tell_each([folder], stores, 2, "eager", {})[folder.name])]
    for number in range(count):
        spoiled = "all of first" if number == 0 else "nothing"
        dist.barrier()
        if dist.get_rank() == 0:
            spoiled = spoil(stores, chance) if number else str(shutil.rmtree(stores[0]) or spoiled)
        dist.barrier()
        found.append((spoiled, tell_each([folder], stores, 2, "eager", {})[folder.name]))
    return found


def check_starts(starts: list[tuple[str, list[dict[str, Any]]]]) -> None:
    tokens = [each["tokens"] for each in starts[0][1]]
    for number, (spoiled, found) in enumerate(starts):
        assert [each["tokens"] for each in found] == tokens, (number, spoiled)
        assert len({each["key"] for each in found}) == 1, (number, spoiled)
        assert sum(each["traced"] for each in found) <= 1, (number, spoiled)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the program of two ranks once, in this process; return the model's folder and the store."""
    place = tmp_path_factory.mktemp("built")
    folder = tiny_folder("llama", place / "llama")
    build_folder(folder, options=options(2, "eager"), store=pw.DiskStore(place / "store"))
    return folder, place / "store"


def test_starts_with_one_ranks_store_deleted(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A cold rank is sent what a warm one has, and nothing is traced or compiled for it."""
    folder, stores = built[0], [tmp_path / "first", tmp_path / "second"]
    for store in stores:
        shutil.copytree(built[1], store)
    first, second = on_ranks(2, start_often, 5, folder, stores)
    check_starts([(one[0], [one[1], other[1]]) for one, other in zip(first, second, strict=True)])
    (_, cold), (_, warm) = first[1], second[1]
    assert (cold["owner"], cold["had"], warm["had"]) == (1, (False, True), (False, True))
    assert [cold["traced"], cold["compiled"], warm["traced"], warm["compiled"]] == [0, 0, 0, 0]


@pytest.mark.soak
def test_fifty_starts_with_one_ranks_store_deleted(tmp_path: Path) -> None:
    folder, stores = tiny_folder("llama", tmp_path / "llama"), [tmp_path / "first", tmp_path / "second"]
    chance = random.Random(SEED)
    starts = [("nothing", start(folder, stores))]
    starts += [(spoil(stores, chance), start(folder, stores)) for _ in range(50)]
    check_starts(starts)


def fail_on(folder: Path, store: Path, rank: int, how: str) -> list[list[int]]:
    """Open a folder whose weights one rank does not find, or end one rank with a signal on the way."""
    own = int(os.environ["RANK"])
    broken = folder.parent / "broken" if own == rank and how == "lacks weights" else folder
    llm = pw.LLM(broken, options=options(2, "eager"), store=pw.DiskStore(store))
    if own == rank and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return [each.token_ids for each in llm.generate([[3, 4, 5]], max_tokens=200, ignore_eos=True)]


def test_what_fails_on_one_rank_is_told_on_all(built: tuple[Path, Path]) -> None:
    folder, store = built
    shutil.copytree(folder, folder.parent / "broken")
    (folder.parent / "broken" / "model.safetensors").unlink()
    found = on_ranks(2, fail_on, folder, store, 1, "lacks weights")
    assert [each["error"] for each in found] == ["BindError", "BindError"]
    assert "rank 1, binding the program: there are no weights in" in found[0]["message"]
    assert found[1]["message"].startswith("there are no weights in")


def test_a_rank_that_dies_ends_the_others(built: tuple[Path, Path]) -> None:
    found = on_ranks(2, fail_on, *built, 1, "dies")
    assert found[1] == -signal.SIGKILL
    assert found[0]["error"] == "ParallelError"
    assert "another rank has ended or answers no more: rank 0 of 2" in found[0]["message"]


def test_weights_of_ranks_are_not_read_by_one_process(built: tuple[Path, Path]) -> None:
    store = pw.DiskStore(built[1])
    with pytest.raises(pw.errors.BindError, match="the weights are for 2 ranks, and this process is one of 1"):
        pw.load(store, key=store.list_records("program")[0], weights=built[0])
