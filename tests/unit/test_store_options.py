"""Read-only, write-only, strict, and a folder that takes no writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from piecework.errors import ArtifactMissing, CorruptEntry, FormatTooNew, StoreUnwritable
from piecework.events import Recorder, StoreWarning
from piecework.store.disk import DiskStore
from piecework.store.envelope import RECORD_WORD, STORE_WORD, encode_record, seal
from piecework.values.digest import digest_bytes


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything of a folder that writing could change: names, inodes, modes, times, bytes."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_ino, status.st_mode, status.st_mtime_ns, data)
    return found


def fill(path: Path) -> str:
    """Write one blob and a record of it."""
    store = DiskStore(path)
    digest = store.write_blob(b"kernel")
    store.write_record("program", "group.key", {"blob": digest})
    return digest


@pytest.mark.parametrize("read_only", [True, False])
def test_a_warm_start_writes_nothing(tmp_path: Path, read_only: bool) -> None:
    digest = fill(tmp_path / "s")
    before = snapshot(tmp_path)
    store = DiskStore(tmp_path / "s", read_only=read_only)
    assert store.list_records("program", "group") == ["group.key"]
    with store.hold("program", "group.key") as hold:
        assert hold.is_effective
        assert store.read_record("program", "group.key") == {"blob": digest}
        assert store.read_blob(digest) == b"kernel" and store.has_blob(digest)
        assert store.kernel_path(digest).read_bytes() == b"kernel"
    assert snapshot(tmp_path) == before


def test_a_read_only_store_keeps_new_entries_in_memory(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    before = snapshot(tmp_path)
    store = DiskStore(tmp_path / "s", read_only=True)
    digest = store.write_blob(b"new")
    store.write_record("program", "group.key", {"blob": digest})
    store.write_record("program", "group.new", {})
    assert store.read_record("program", "group.key") == {"blob": digest} and store.read_blob(digest) == b"new"
    assert store.list_records("program", "group") == ["group.key", "group.new"]
    assert store.kernel_path(digest).read_bytes() == b"new"
    with store.single_flight("work") as flight:
        assert flight.owned and not flight.exclusive
    store.delete_record("program", "group.new")
    with pytest.raises(StoreUnwritable, match="was opened read-only"):
        store.check_writable()
    assert snapshot(tmp_path) == before


def test_reading_where_no_folder_is_makes_none(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "absent")
    assert store.list_records("program") == [] and not store.has_blob(digest_bytes(b""))
    assert not (tmp_path / "absent").exists()


def test_a_write_only_store_reads_only_what_it_wrote(tmp_path: Path) -> None:
    digest = fill(tmp_path / "s")
    store = DiskStore(tmp_path / "s", write_only=True)
    assert not store.has_blob(digest) and store.list_records("program") == []
    with pytest.raises(ArtifactMissing, match="opened write-only"):
        store.read_blob(digest)
    with pytest.raises(ArtifactMissing, match="opened write-only"):
        store.read_record("program", "group.key")
    store.write_blob(b"kernel")
    store.write_record("program", "group.key", {"blob": digest, "again": True})
    assert store.read_blob(digest) == b"kernel" and store.list_records("program", "group") == ["group.key"]
    assert DiskStore(tmp_path / "s").read_record("program", "group.key")["again"] is True


def test_a_damaged_entry_is_a_miss_told_once_and_rewritten(tmp_path: Path) -> None:
    digest, recorder = fill(tmp_path / "s"), Recorder()
    path = tmp_path / "s" / "blobs" / digest[:2] / digest
    path.write_bytes(b"kernal")
    store = DiskStore(tmp_path / "s", observer=recorder)
    for _ in range(3):
        with pytest.raises(ArtifactMissing):
            store.read_blob(digest)
    (warning,) = recorder.of(StoreWarning)
    assert warning.path == str(path) and "its digest is not the one it is named by (6 bytes)" in warning.reason
    assert [p.read_bytes() for p in (tmp_path / "s" / "quarantine").iterdir()] == [b"kernal"]
    assert store.write_blob(b"kernel") == digest and store.read_blob(digest) == b"kernel"


def test_a_damaged_blob_that_was_not_read_is_replaced_by_a_write(tmp_path: Path) -> None:
    digest = fill(tmp_path / "s")
    path = tmp_path / "s" / "blobs" / digest[:2] / digest
    path.write_bytes(b"kernal")
    DiskStore(tmp_path / "s").write_blob(b"kernel")
    assert path.read_bytes() == b"kernel"


def test_strict_makes_damage_an_error_and_leaves_the_evidence(tmp_path: Path) -> None:
    digest = fill(tmp_path / "s")
    path = tmp_path / "s" / "blobs" / digest[:2] / digest
    path.write_bytes(b"")
    with pytest.raises(CorruptEntry, match="is damaged") as caught:
        DiskStore(tmp_path / "s", strict=True).read_blob(digest)
    assert caught.value.facts["path"] == str(path) and path.exists()


def test_a_check_of_a_kind_makes_a_record_without_pieces_a_miss(tmp_path: Path) -> None:
    recorder = Recorder()
    DiskStore(tmp_path / "s").write_record("program", "key", {"pieces": []})
    DiskStore(tmp_path / "s").write_record("program", "other", {})
    store = DiskStore(
        tmp_path / "s",
        checks={"program": lambda key, record: "" if record["pieces"] else "it has no pieces"},
        observer=recorder,
    )
    assert not store.has_record("program", "key") and not store.has_record("program", "other")
    assert [warning.reason.split(";")[0] for warning in recorder.of(StoreWarning)] == [
        "it has no pieces",
        "it lacks what program records have (KeyError: 'pieces')",
    ]


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    path = tmp_path / "s" / "records" / "program" / "gr" / "group.key.record"
    newer = seal(RECORD_WORD, encode_record("program", "group.key", {}), version=2)
    path.write_bytes(newer)
    with pytest.raises(FormatTooNew, match="has format 2; this release reads format 1"):
        DiskStore(tmp_path / "s").read_record("program", "group.key")
    assert path.read_bytes() == newer
    path.write_bytes(newer.replace(b"record 2", b"record 1", 1))  # the format's digit is covered by the digest
    with pytest.raises(ArtifactMissing):
        DiskStore(tmp_path / "s").read_record("program", "group.key")
    (tmp_path / "s" / "FORMAT").write_bytes(seal(STORE_WORD, b"", version=7))
    for use in (lambda s: s.has_blob(digest_bytes(b"x")), lambda s: s.write_blob(b"x")):
        with pytest.raises(FormatTooNew, match="has format 7"):
            use(DiskStore(tmp_path / "s"))


def test_a_damaged_marker_is_told_and_rewritten(tmp_path: Path) -> None:
    digest, recorder = fill(tmp_path / "s"), Recorder()
    whole = (tmp_path / "s" / "FORMAT").read_bytes()
    (tmp_path / "s" / "FORMAT").write_bytes(whole[:-1])
    store = DiskStore(tmp_path / "s", observer=recorder)
    assert store.read_blob(digest) == b"kernel" and len(recorder.of(StoreWarning)) == 1
    store.write_blob(b"new")
    assert (tmp_path / "s" / "FORMAT").read_bytes() == whole


class FullDisk:
    """Raise ENOSPC before the writes whose turn it is."""

    def __init__(self, refuse: set[int]) -> None:
        self.refuse, self.count = refuse, 0

    def __call__(self, step: str) -> None:
        if step == "write":
            self.count += 1
            if self.count in self.refuse:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_once_and_the_others_are_kept(tmp_path: Path) -> None:
    recorder = Recorder()
    store = DiskStore(tmp_path / "s", observer=recorder, on_step=FullDisk({3, 5}))  # the first write is the marker
    digests = [store.write_blob(data) for data in (b"one", b"two", b"three")]
    store.write_record("artifact", "kept", {"blob": digests[0]})  # the fifth write
    store.write_record("artifact", "of_two", {"blob": digests[1]})  # refers to what is not on disk
    store.write_record("artifact", "of_three", {"blob": digests[2]})
    assert [store.read_blob(digest) for digest in digests] == [b"one", b"two", b"three"]
    assert store.list_records("artifact") == ["kept", "of_three", "of_two"]
    (warning,) = recorder.of(StoreWarning)
    assert warning.reason == "it takes no writes (No space left on device); what is not stored runs from memory"
    later = DiskStore(tmp_path / "s")
    assert later.list_records("artifact") == ["of_three"] and later.has_blob(digests[0])
    assert not later.has_blob(digests[1]) and os.listdir(tmp_path / "s" / "staging") == []


def test_strict_makes_an_unwritable_folder_an_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "s", strict=True, on_step=FullDisk({1}))
    with pytest.raises(StoreUnwritable, match="takes no writes: No space left on device"):
        store.write_blob(b"x")


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for use in (lambda s: s.write_blob(b""), lambda s: s.has_blob(digest_bytes(b"")), lambda s: s.check_writable()):
        with pytest.raises(StoreUnwritable, match="is not a folder"):
            use(DiskStore(tmp_path / "file"))


def test_a_file_above_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    seen = Recorder()
    store = DiskStore(tmp_path / "file" / "deep" / "store", observer=seen)
    for use in (lambda: store.write_blob(b"x"), lambda: store.list_records("program", "ab"), store.check_writable):
        with pytest.raises(StoreUnwritable, match=f"lies under `{tmp_path / 'file'}`, which is not a folder"):
            use()
    assert not seen.of(StoreWarning)


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    DiskStore(tmp_path / "s").check_writable()
    assert sorted(os.listdir(tmp_path / "s")) == ["FORMAT", "staging"]
    assert os.listdir(tmp_path / "s" / "staging") == []


def test_the_same_entry_is_not_written_twice(tmp_path: Path) -> None:
    digest = fill(tmp_path / "s")
    paths = [*(tmp_path / "s").rglob(digest), *(tmp_path / "s").rglob("*.record")]
    inodes = [path.stat().st_ino for path in paths]
    assert fill(tmp_path / "s") == digest
    assert [path.stat().st_ino for path in paths] == inodes and len(paths) == 2
