"""Damaged stores: never a crash, never wrong bytes, and whole again after the next write."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hostile.damage import (
    DAMAGES,
    KERNELS,
    NOBODY,
    find_victims,
    flip,
    give_to,
    open_store,
    read_everything,
    write_all,
)
from hostile.processes import open_folder, run_as
from piecework.errors import ArtifactMissing, CorruptEntry, StoreError
from piecework.events import Recorder, StoreWarning
from piecework.store.disk import DiskStore
from piecework.values.digest import digest_bytes

WHOLE = {digest_bytes(kernel): kernel for kernel in KERNELS}
CASES = [pytest.param(200, id="tenth"), pytest.param(2000, id="full", marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "store"
    write_all(open_store(path))
    return path


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of stores are made and forced to the disk."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("count", CASES)
def test_damaged_stores_never_crash_and_never_serve_wrong_bytes(template: Path, scratch: Path, count: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(count):
        chance = random.Random(f"store {number}")
        root = scratch / str(number) / "a" / "store"
        shutil.copytree(template, root)
        for _ in range(chance.choice([1, 1, 1, 2, 4])):
            victims = find_victims(root)
            if victims:
                damage = chance.choice(DAMAGES)
                damage(chance.choice(victims), chance)
                seen[damage.__name__] += 1
        recorder = Recorder()
        store = open_store(root, observer=recorder)
        _, missed = read_everything(store)
        told = [warning.path for warning in recorder.of(StoreWarning)]
        assert len(told) == len(set(told)) and all(path.startswith(str(root)) for path in told)
        store.write_blob(b"unrelated")
        write_all(store)
        assert read_everything(open_store(root)) == (26, 0), (number, missed)
        shutil.rmtree(scratch / str(number))
    assert set(seen) == {damage.__name__ for damage in DAMAGES}


@pytest.mark.parametrize("count", CASES)
def test_every_cut_and_every_flip_of_a_record_and_a_blob_is_a_miss(template: Path, scratch: Path, count: int) -> None:
    root = scratch / "store"
    shutil.copytree(template, root)
    record, blob = root / "records/program/gr/group.one.record", max(find_victims(root), key=lambda p: p.stat().st_size)
    chance = random.Random("cuts and flips")
    for path, read in (
        (record, lambda: open_store(root, strict=True).read_record("program", "group.one")),
        (blob, lambda: open_store(root, strict=True).read_blob(blob.name)),
    ):
        whole = path.read_bytes()
        read()
        cuts = range(len(whole)) if count > 200 else sorted(chance.sample(range(len(whole)), 100))
        for cut in cuts:
            path.write_bytes(whole[:cut])
            with pytest.raises(CorruptEntry, match="is damaged"):
                read()
            path.write_bytes(whole[:cut] + bytes([whole[cut] ^ (1 << chance.randrange(8))]) + whole[cut + 1 :])
            with pytest.raises(CorruptEntry, match="is damaged"):
                read()
        path.write_bytes(whole)
        read()


def test_a_read_only_store_serves_what_is_whole_and_touches_nothing(template: Path, scratch: Path) -> None:
    root = scratch / "store"
    shutil.copytree(template, root)
    flip(max(find_victims(root), key=lambda path: path.stat().st_size), random.Random(1))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*"))
    served, missed = read_everything(open_store(root, read_only=True))
    assert (served, missed) == (22, 4)  # one blob: read and as a kernel, for two programs
    assert sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*")) == before


class Bomb:
    """Leaves a mark if anyone unpickles it."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (self.mark,))


def test_nothing_is_unpickled(template: Path, scratch: Path) -> None:
    root, mark = scratch / "store", scratch / "mark"
    shutil.copytree(template, root)
    bomb = pickle.dumps(Bomb(str(mark)))
    for path in [*find_victims(root), root / "FORMAT"]:
        path.write_bytes(bomb)
    assert read_everything(open_store(root)) == (0, 2) and not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # it would have gone off


@pytest.mark.skipif(not os.path.exists("/etc/passwd"), reason="needs a file of another owner")
def test_links_out_of_the_store_are_never_followed(template: Path, scratch: Path) -> None:
    root = scratch / "store"
    shutil.copytree(template, root)
    outside = scratch / "outside"
    os.rename(root / "blobs", outside)
    (root / "blobs").symlink_to(outside)
    recorder = Recorder()
    store = open_store(root, observer=recorder)
    assert all(not store.has_blob(digest) for digest in WHOLE)
    assert "it is a link, or lies behind one" in recorder.of(StoreWarning)[0].reason
    before = sorted(outside.rglob("*"))
    write_all(store)
    assert sorted(outside.rglob("*")) == before and not (root / "blobs").is_symlink()
    assert read_everything(open_store(root)) == (26, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_an_unreadable_entry_is_a_miss_and_rewritten(template: Path) -> None:
    with open_folder() as folder:
        root = folder / "store"
        shutil.copytree(template, root)
        for path in find_victims(root)[::2]:
            path.chmod(0)
        (root / "records" / "program").chmod(0)
        give_to(NOBODY, root)

        def work() -> list[int]:
            recorder = Recorder()
            store = open_store(root, observer=recorder)
            for key in ("group.one", "group.two"):
                assert not store.has_record("program", key)
            missing = sum(not store.has_blob(digest) for digest in WHOLE)
            assert all("cannot be read (Permission denied)" in w.reason for w in recorder.of(StoreWarning))
            (root / "records" / "program").chmod(0o755)
            write_all(store)
            return [missing, *read_everything(open_store(root))]

        missing, served, missed = run_as(NOBODY, work)
        assert missing == 2 and (served, missed) == (26, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_folder_that_takes_no_writes_costs_one_warning(template: Path) -> None:
    with open_folder() as folder:
        root = folder / "store"
        shutil.copytree(template, root)
        give_to(NOBODY, root)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)

        def work() -> list[str]:
            recorder = Recorder()
            store = open_store(root, observer=recorder)
            assert read_everything(store) == (26, 0)
            digest = store.write_blob(b"new")
            store.write_record("program", "group.new", {"pieces": [digest], "toolchain": {}})
            assert store.read_blob(digest) == b"new" and store.has_record("program", "group.new")
            with store.single_flight("work") as flight:
                assert flight.owned and not flight.exclusive
            return [warning.reason for warning in recorder.of(StoreWarning)]

        assert run_as(NOBODY, work) == [
            "it takes no writes (Permission denied); what is not stored runs from memory",
        ]


def test_no_descriptors_left_is_not_taken_for_damage(template: Path, scratch: Path) -> None:
    root = scratch / "store"
    shutil.copytree(template, root)

    def work() -> str:
        store, taken = open_store(root), []
        assert read_everything(store) == (26, 0)
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            store.read_blob(digest_bytes(KERNELS[1]))
        except StoreError as error:
            message = error.message
        for descriptor in taken:
            os.close(descriptor)
        assert read_everything(store) == (26, 0)
        return message

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        message = run_as(os.geteuid(), work)
    assert message.endswith("cannot be read: Too many open files") and not (root / "quarantine").exists()


@pytest.mark.parametrize("count", CASES)
def test_entries_that_change_while_they_are_read(template: Path, scratch: Path, count: int) -> None:
    root = scratch / "a" / "b" / "store"
    shutil.copytree(template, root)
    path, finished = max(find_victims(root), key=lambda p: p.stat().st_size), threading.Event()
    whole = path.read_bytes()

    def damage() -> None:
        chance = random.Random("race")
        while not finished.is_set():
            for turn in (lambda: path.write_bytes(whole[:100]), lambda: flip(path, chance), lambda: path.unlink()):
                try:
                    turn()
                except OSError:
                    pass
                store = DiskStore(root)
                store.write_blob(whole)

    thread = threading.Thread(target=damage)
    thread.start()
    try:
        served = turns = 0
        while turns < count or not served:
            turns += 1
            assert turns < 100 * count
            store = DiskStore(root)
            try:
                assert store.read_blob(path.name) == whole
                served += 1
            except ArtifactMissing:
                pass
    finally:
        finished.set()
        thread.join()
    assert served > 0
    DiskStore(root).write_blob(whole)
    assert DiskStore(root).read_blob(path.name) == whole
