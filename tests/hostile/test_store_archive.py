"""A store in one file: the same bytes for the same entries, and nothing believed that was not compared."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hostile.damage import write_all
from hostile.test_store_damage import read_everything
from piecework.errors import (
    ArtifactMissing,
    CorruptEntry,
    FormatTooNew,
    OptionError,
    StoreUnwritable,
    UntrustedArtifact,
)
from piecework.store import archive
from piecework.store.archive import Member, export_archive, import_archive
from piecework.store.disk import DiskStore
from piecework.store.envelope import seal
from piecework.store.inventory import list_stored, measure, verify
from piecework.values.digest import canonical_json, digest_bytes

pytest.importorskip("nacl")

from piecework.store import keys, signing


@pytest.fixture
def filled(tmp_path: Path) -> DiskStore:
    store = DiskStore(tmp_path / "filled")
    write_all(store)
    return store


def test_what_comes_out_is_what_went_in(filled: DiskStore, tmp_path: Path) -> None:
    out = export_archive(filled, tmp_path / "a.tar")
    assert len(out.records) == 6 and out.blobs == 4 and out.size_bytes == (tmp_path / "a.tar").stat().st_size
    target = DiskStore(tmp_path / "target")
    assert import_archive(target, tmp_path / "a.tar").records == out.records
    assert read_everything(DiskStore(tmp_path / "target")) == (26, 0)
    assert verify(target) == [] and measure(target).total_bytes == measure(filled).total_bytes


def test_equal_stores_give_equal_files(filled: DiskStore, tmp_path: Path) -> None:
    other = DiskStore(tmp_path / "elsewhere" / "other")
    write_all(other)
    other.write_blob(b"of no record")
    for name, store in (("a", filled), ("b", other), ("c", filled)):
        export_archive(store, tmp_path / name)
    assert len({digest_bytes((tmp_path / name).read_bytes()) for name in "abc"}) == 1


def test_an_unpacked_archive_is_a_store(filled: DiskStore, tmp_path: Path) -> None:
    export_archive(filled, tmp_path / "a.tar")
    (tmp_path / "unpacked").mkdir(mode=0o755)
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert read_everything(DiskStore(tmp_path / "unpacked", read_only=True)) == (26, 0)


def test_a_choice_of_records_brings_what_they_refer_to(filled: DiskStore, tmp_path: Path) -> None:
    out = export_archive(filled, tmp_path / "a.tar", [("program", "group.one")])
    assert [kind for kind, _ in out.records] == ["artifact"] * 4 + ["program"] and out.blobs == 4
    with pytest.raises(ArtifactMissing, match="no program record `group.none` can be exported"):
        export_archive(filled, tmp_path / "b.tar", [("program", "group.none")])


def test_signatures_travel_and_unsigned_records_do_not_enter(filled: DiskStore, tmp_path: Path) -> None:
    keys.make_key(tmp_path / "k.key")
    secret = keys.read_secret(tmp_path / "k.key")
    export_archive(filled, tmp_path / "unsigned.tar")
    signing.sign_records(filled, secret)
    export_archive(filled, tmp_path / "signed.tar")
    trust = signing.SignedRecords((secret.public,))
    target = DiskStore(tmp_path / "target", trust=trust)
    with pytest.raises(UntrustedArtifact, match="it is not signed"):
        import_archive(target, tmp_path / "unsigned.tar")
    assert list_stored(DiskStore(tmp_path / "target")) == []
    import_archive(target, tmp_path / "signed.tar")
    assert read_everything(DiskStore(tmp_path / "target", trust=trust)) == (26, 0)


def test_files_that_cannot_be_read_or_written(filled: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        import_archive(filled, tmp_path / "none.tar")
    with pytest.raises(StoreUnwritable, match="cannot be written"):
        export_archive(filled, tmp_path / "no folder" / "a.tar")
    with pytest.raises(StoreUnwritable, match="was opened read-only"):
        import_archive(DiskStore(tmp_path / "t", read_only=True), tmp_path / "none.tar")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("count", [pytest.param(60, id="tenth"), pytest.param(600, id="full", marks=pytest.mark.soak)])
def test_a_damaged_archive_adds_nothing(filled: DiskStore, tmp_path: Path, count: int) -> None:
    export_archive(filled, tmp_path / "a.tar")
    whole, damaged = (tmp_path / "a.tar").read_bytes(), tmp_path / "damaged.tar"
    chance, target = random.Random("archive"), DiskStore(tmp_path / "target")
    for turn in range(count):
        data = bytearray(whole)
        if turn % 3 == 0:
            data = data[: chance.randrange(len(data))]
        elif turn % 3 == 1:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            data[chance.randrange(len(data)) :] += chance.randbytes(chance.randrange(1, 2000))
        if bytes(data) == whole:
            continue
        damaged.write_bytes(data)
        with pytest.raises((CorruptEntry, FormatTooNew), match="damaged.tar"):
            import_archive(target, damaged)
    assert not (target.path / "blobs").exists() and not (target.path / "records").exists()


def forge(path: Path, index: object, members: list[tuple[str, bytes]]) -> Path:
    """Write an archive whose every digest is right, with whatever index and members are given."""
    with path.open("wb") as out:
        archive._add(out, archive.INDEX, seal(archive.ARCHIVE_WORD, canonical_json(index).encode()))
        for name, data in members:
            archive._add(out, name, data)
        out.write(bytes(1024))
    return path


FORGED_NAMES = ["../evil", "/etc/evil", "blobs/../../evil", "blobs/aa/" + "b" * 64, "FORMAT2", "staging/x", ""]
FORGED_NAMES += ["records/program/gr/../x", "records/program/xx/group.one.record", "records", "blobs", "signatures/x"]


@pytest.mark.parametrize("name", FORGED_NAMES)
def test_a_name_that_has_no_place_in_a_store_is_refused(tmp_path: Path, name: str) -> None:
    path = forge(tmp_path / "a.tar", [[name, 4, digest_bytes(b"evil")]], [(name, b"evil")])
    with pytest.raises(CorruptEntry, match="has no place in a store"):
        import_archive(DiskStore(tmp_path / "deep" / "target"), path)
    assert not list(tmp_path.rglob("evil*"))


INDICES: list[object] = [{}, 3, None, [3], [["FORMAT"]], [["FORMAT", "4", "x"]], [["FORMAT", True, "x"]], [[1, 2, 3]],
                         [["FORMAT", 10**30, "x"]], [["FORMAT", -1, "x"]], [["FORMAT", 4, None]]]  # fmt: skip


@pytest.mark.parametrize("index", INDICES)
def test_an_odd_index_is_refused(tmp_path: Path, index: object) -> None:
    with pytest.raises(CorruptEntry, match="is damaged"):
        import_archive(DiskStore(tmp_path / "target"), forge(tmp_path / "a.tar", index, [("FORMAT", b"evil")]))


def link_member(tar: tarfile.TarFile) -> None:
    info = tarfile.TarInfo("blobs/aa/" + "a" * 64)
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    tar.addfile(info)


def plain_member(tar: tarfile.TarFile) -> None:
    info = tarfile.TarInfo("../escaped")
    info.size = 4
    tar.addfile(info, io.BytesIO(b"evil"))


@pytest.mark.parametrize("add", [link_member, plain_member, lambda tar: None])
def test_any_other_tar_is_refused(tmp_path: Path, add: Callable[[tarfile.TarFile], None]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar)
    with pytest.raises(CorruptEntry, match="does not begin with an index"):
        import_archive(DiskStore(tmp_path / "target"), tmp_path / "a.tar")


def test_a_forged_record_is_refused_whole(filled: DiskStore, tmp_path: Path) -> None:
    name = "records/program/gr/group.one.record"
    whole = (filled.path / name).read_bytes()
    for data in (b"nonsense", seal("piecework-record", b"[]"), whole.replace(b"one", b"two")):
        path = forge(tmp_path / "a.tar", [[name, len(data), digest_bytes(data)]], [(name, data)])
        with pytest.raises(CorruptEntry, match="group.one.record`"):
            import_archive(DiskStore(tmp_path / "target"), path)
    assert not (tmp_path / "target" / "records").exists()
    assert Member(("a", "b"), 1, "").name == "a/b" and os.path.exists(tmp_path / "target" / "FORMAT")
