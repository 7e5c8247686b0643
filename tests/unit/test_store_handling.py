"""Listing, counting, showing, comparing and verifying a store, and keeping it within bounds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hostile.processes import fork, kill, refuse_locks, wait_for
from piecework.errors import ArtifactMissing, OptionError, StoreUnwritable
from piecework.store.collect import collect
from piecework.store.disk import DiskStore
from piecework.store.files import FILE_MODE
from piecework.store.inventory import find_differences, find_record, list_stored, measure, show, verify
from piecework.store.layout import record_parts
from piecework.store.notes import write_note
from piecework.store.owner import current_owner
from piecework.values.digest import digest_bytes

DAY_S = 86400.0


def write_program(store: DiskStore, name: str, *blobs: bytes) -> list[str]:
    """Write a program of one artifact a blob; return the digests."""
    digests = [store.write_blob(blob) for blob in blobs]
    for index, digest in enumerate(digests):
        store.write_record("artifact", f"{name}-artifact{index}", {"kernels": {"k": digest}})
    artifacts = [f"{name}-artifact{index}" for index in range(len(digests))]
    store.write_record("program", f"group.{name}", {"artifacts": artifacts, "name": name})
    return digests


def age(store: DiskStore, kind: str, key: str, days: float) -> None:
    """Make a record one that was last used so many days ago."""
    moment = time.time() - days * DAY_S
    os.utime(store.path.joinpath(*record_parts(kind, key)), (moment, moment))


def age_blobs(store: DiskStore) -> None:
    """Make every blob old enough to be collected."""
    for path in (store.path / "blobs").rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - DAY_S,) * 2)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """Three programs, the oldest first, and one blob that two of them share."""
    store = DiskStore(tmp_path / "s")
    for days, name in ((30, "old"), (20, "middle"), (10, "new")):
        write_program(store, name, name.encode() * 1000, b"shared" if name != "old" else b"alone")
        for index in range(2):
            age(store, "artifact", f"{name}-artifact{index}", days)
        age(store, "program", f"group.{name}", days)
    age_blobs(store)
    return store


def test_what_is_listed_says_what_belongs_together(store: DiskStore) -> None:
    records = {record.key: record for record in list_stored(store)}
    assert len(records) == 9 and [record.kind for record in records.values()] == ["artifact"] * 6 + ["program"] * 3
    program, artifact = records["group.new"], records["new-artifact1"]
    assert program.records == (("artifact", "new-artifact0"), ("artifact", "new-artifact1")) and program.blobs == {}
    assert artifact.blobs == {digest_bytes(b"shared"): 6} and not artifact.is_signed
    assert artifact.total_bytes == artifact.size_bytes + 6
    assert [record.key for record in list_stored(store, "program")] == ["group.middle", "group.new", "group.old"]


def test_what_is_counted(store: DiskStore) -> None:
    store.write_blob(b"of no record")
    numbers = measure(store)
    assert numbers.records == {"artifact": 6, "program": 3} and numbers.format == 1
    assert (numbers.blobs, numbers.unreferenced_blobs, numbers.quarantined, numbers.being_written) == (6, 1, 0, 0)
    files = [path for path in store.path.rglob("*") if path.is_file() and path.name != "FORMAT"]
    assert numbers.total_bytes == sum(path.stat().st_size for path in files)


def test_a_record_is_found_by_what_its_key_begins_with(store: DiskStore) -> None:
    assert find_record(store, "group.n") == ("program", "group.new")
    assert find_record(store, "artifact/old-artifact1") == ("artifact", "old-artifact1")
    with pytest.raises(OptionError, match="`group` names 3 records"):
        find_record(store, "group")
    with pytest.raises(ArtifactMissing, match="no record `zzz`"):
        find_record(store, "zzz")
    shown = show(store, "artifact", "new-artifact0")
    assert shown["record"] == {"kernels": {"k": digest_bytes(b"new" * 1000)}}
    assert shown["referred_to_by"] == [["program", "group.new"]] and shown["refers_to"] == []
    assert shown["bytes"]["blobs"] == {digest_bytes(b"new" * 1000): 3000}
    with pytest.raises(ArtifactMissing):
        show(store, "program", "group.none")


def test_differences_are_named_by_their_path() -> None:
    first = {"torch": "2.13", "flags": ["a", "b"], "same": 1, "deep": {"x": 1}, "gone": True}
    second = {"torch": "2.14", "flags": ["a", "c"], "same": 1, "deep": {"x": 2}, "more": [1]}
    assert find_differences(first, second) == [
        ("deep.x", 1, 2),
        ("flags[1]", "b", "c"),
        ("gone", True, None),
        ("more", None, [1]),
        ("torch", "2.13", "2.14"),
    ]
    assert find_differences(first, first) == []


def test_looking_is_no_use(store: DiskStore) -> None:
    before = {record.name: record.last_use_s for record in list_stored(store)}
    measure(store), verify(store), show(store, "program", "group.old")
    assert {record.name: record.last_use_s for record in list_stored(store)} == before


def test_verify_names_every_damaged_entry_and_repairs_on_demand(store: DiskStore) -> None:
    assert verify(store) == []
    blob = store.path / "blobs" / digest_bytes(b"alone")[:2] / digest_bytes(b"alone")
    record = store.path.joinpath(*record_parts("program", "group.old"))
    folder = store.path / "blobs" / digest_bytes(b"shared")[:2] / digest_bytes(b"shared")
    stranger = store.path / "blobs" / "zz"
    blob.write_bytes(b"alome"), record.write_bytes(record.read_bytes()[:-1]), stranger.write_bytes(b""), folder.unlink()
    folder.mkdir()
    length = int(record.read_bytes().split()[2])
    faults = {Path(fault.path): fault.reason for fault in verify(store)}
    assert faults == {
        blob: "its digest is not the one it is named by (5 bytes)",
        record: f"{length - 1} bytes follow its first line, which says {length}",
        folder: "a folder stands in its place",
        stranger: "it is no entry of a store",
    }
    assert len(verify(store, repair=True)) == 4 and [fault.path for fault in verify(store)] == [str(stranger)]
    assert measure(store).quarantined == 3


# Bounds


def test_the_least_recently_used_go_first_and_shared_blobs_stay(store: DiskStore) -> None:
    total = measure(store).total_bytes
    done = collect(store, max_bytes=total - 1)
    assert done.evicted[0] == ("program", "group.old") and all("old" in key for _, key in done.evicted)
    done = collect(store, max_bytes=total - 3000)
    assert {key for _, key in done.evicted} <= {"old-artifact0", "old-artifact1"}
    assert store.list_records("program") == ["group.middle", "group.new"]
    collect(store, max_bytes=4000)
    assert store.list_records("program") == ["group.new"] and store.has_blob(digest_bytes(b"shared"))
    assert not store.has_blob(digest_bytes(b"middle" * 1000))
    done = collect(store, max_bytes=0)
    assert measure(store).total_bytes == 0 == done.left_bytes and verify(store) == []


def test_freed_and_left_bytes_are_what_the_folder_says(store: DiskStore) -> None:
    total = measure(store).total_bytes
    done = collect(store, max_bytes=7000)
    assert done.freed_bytes + done.left_bytes == total and measure(store).total_bytes == done.left_bytes <= 7000


def test_notes_go_with_their_record(store: DiskStore) -> None:
    for name in ("old", "new"):
        assert write_note(store, "program", f"group.{name}", "graph.py", "x = 1\n")
    assert len(list_stored(store)) == 9 and verify(store) == []
    collect(store, unused_s=15 * DAY_S)
    store.delete_record("program", "group.new")
    assert list(store.path.rglob("graph.py")) == []
    assert write_note(DiskStore(store.path, read_only=True), "program", "group.new", "graph.py", "") is None


def test_nothing_goes_without_a_reason(store: DiskStore) -> None:
    done = collect(store)
    assert done.evicted == () and done.blobs_removed == 0 and len(list_stored(store)) == 9


def test_a_use_that_was_noted_counts(store: DiskStore) -> None:
    store.note_use("program", "group.old")
    assert [path.name for path in (store.path / "uses").rglob("*.use")] == ["group.old.use"]
    done = collect(store, max_bytes=measure(store).total_bytes - 1)
    assert done.evicted[0] == ("program", "group.middle") and store.has_record("artifact", "old-artifact0")
    collect(store, max_bytes=0)
    assert [path for path in (store.path / "uses").rglob("*") if path.is_file()] == []


def test_a_use_is_noted_only_where_the_times_do_not_tell_it(store: DiskStore) -> None:
    record = store.path.joinpath(*record_parts("program", "group.old"))
    DiskStore(store.path, record_uses=True).read_record("program", "group.old")
    is_told = time.time() - record.stat().st_atime < DAY_S  # not so under `noatime`
    assert bool(list((store.path / "uses").rglob("*.use"))) != is_told
    DiskStore(store.path, record_uses=True).write_record("program", "fresh", {})
    DiskStore(store.path, record_uses=True).read_record("program", "fresh")
    assert not list((store.path / "uses").rglob("fresh.use"))
    done = collect(store, max_bytes=measure(store).total_bytes - 1)
    assert done.evicted[0] == ("program", "group.middle")


def test_records_unused_for_long_go(store: DiskStore) -> None:
    done = collect(store, unused_s=15 * DAY_S)
    assert store.list_records("program") == ["group.new"] and len(done.evicted) == 6 and done.blobs_removed == 3


def test_what_a_live_process_holds_is_never_evicted(store: DiskStore, tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def hold() -> None:
        with DiskStore(store.path, read_only=True).hold("program", "group.old"):
            ready.touch()
            time.sleep(60)

    child = fork(hold)
    wait_for(ready)
    done = collect(store, max_bytes=0)
    assert done.held == (("artifact", "old-artifact0"), ("artifact", "old-artifact1"), ("program", "group.old"))
    assert [record.key for record in list_stored(store)] == ["old-artifact0", "old-artifact1", "group.old"]
    assert store.has_blob(digest_bytes(b"old" * 1000)) and store.has_blob(digest_bytes(b"alone"))
    kill(child)
    assert collect(store, max_bytes=0).held == () and list_stored(store) == []


def test_a_hold_is_let_go_by_close_and_says_when_it_is_none(store: DiskStore) -> None:
    hold = store.hold("program", "group.new")
    assert hold.is_effective and len(collect(store, max_bytes=0).held) == 3
    hold.close(), hold.close()
    assert not hold.is_effective and collect(store, max_bytes=0).held == ()
    assert not store.hold("program", "group.new").is_effective


def test_young_blobs_wait_for_their_record(store: DiskStore) -> None:
    digest = store.write_blob(b"record to follow")
    assert collect(store).blobs_removed == 0 and store.has_blob(digest)
    age_blobs(store)
    store.write_blob(b"record to follow")  # written again: young again
    assert collect(store).blobs_removed == 0
    age_blobs(store)
    assert collect(store).blobs_removed == 1 and not store.has_blob(digest)


def test_without_locks_nothing_is_taken_for_unheld(store: DiskStore) -> None:
    assert collect(store, max_bytes=0, lock=refuse_locks).evicted == () and len(list_stored(store)) == 9


def test_rubbish_of_the_dead_goes_and_of_the_living_stays(store: DiskStore) -> None:
    dead = fork(lambda: None)
    me = current_owner()
    os.waitpid(dead, 0)
    names = {f"{me.as_name()}.aa": True, f"{me.place}-{dead}-1.bb": False, "elsewhere-1-1.cc": True, "strange": True}
    for name in names:
        os.close(os.open(store.path / "staging" / name, os.O_CREAT, FILE_MODE))
    (store.path / "quarantine" / "x" / "y").mkdir(parents=True)
    (store.path / "quarantine" / "link").symlink_to(store.path / "blobs")
    done = collect(store, grace_s=-1)
    assert set(os.listdir(store.path / "staging")) == {name for name, stays in names.items() if stays}
    assert os.listdir(store.path / "quarantine") == [] and done.rubbish_removed == 3 and measure(store).blobs == 5


def test_a_read_only_store_is_not_collected(store: DiskStore) -> None:
    with pytest.raises(StoreUnwritable, match="was opened read-only"):
        collect(DiskStore(store.path, read_only=True), max_bytes=0)
