"""Whom a store believes by owner and mode, and who believes everybody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.damage import NOBODY, give_to
from hostile.processes import open_folder, run_as
from piecework.errors import ArtifactMissing, UntrustedArtifact
from piecework.store.disk import DiskStore
from piecework.store.layout import record_parts
from piecework.store.trust import AnyFiles, OwnFiles, find_open_folder

KEY = "group.one"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can go through."""
    with open_folder() as path:
        yield path


def fill(path: Path) -> str:
    """Write one program, its artifact and its kernel; return the kernel's digest."""
    store = DiskStore(path)
    digest = store.write_blob(b"kernel")
    store.write_record("artifact", "a1", {"kernels": {"k": digest}, "toolchain": {"torch": "2.13"}})
    store.write_record("program", KEY, {"artifacts": ["a1"], "toolchain": {"torch": "2.13"}})
    return digest


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o1777, 0o720])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    digest = fill(folder / "s")
    (folder / "s").chmod(mode)
    for use in (
        lambda store: store.read_record("program", KEY),
        lambda store: store.has_blob(digest),
        lambda store: store.list_records("program"),
        lambda store: store.write_blob(b"new"),
    ):
        with pytest.raises(UntrustedArtifact, match="others than its owner can write") as caught:
            use(DiskStore(folder / "s"))
        assert f"chmod go-w {folder}" in caught.value.hint and caught.value.exit_code == 5
    assert DiskStore(folder / "s", trust=AnyFiles()).read_blob(digest) == b"kernel"


def test_a_folder_above_that_others_can_write_is_refused(folder: Path) -> None:
    (folder / "open").mkdir()
    fill(folder / "open" / "deep" / "s")
    (folder / "open").chmod(0o777)
    with pytest.raises(UntrustedArtifact, match="open` \\(mode 0777\\)"):
        DiskStore(folder / "open" / "deep" / "s").read_record("program", KEY)
    with pytest.raises(UntrustedArtifact):
        DiskStore(folder / "open" / "not made yet").write_blob(b"")
    (folder / "open").chmod(0o1777)  # as `/tmp`: others add names, and take none away
    assert DiskStore(folder / "open" / "deep" / "s").has_record("program", KEY)


def test_a_link_to_the_folder_counts_by_what_it_leads_through(folder: Path) -> None:
    fill(folder / "real" / "s")
    (folder / "link").symlink_to(folder / "real")
    assert DiskStore(folder / "link" / "s").has_record("program", KEY)
    (folder / "real").chmod(0o777)
    with pytest.raises(UntrustedArtifact, match="real"):
        DiskStore(folder / "link" / "s").has_record("program", KEY)


def test_an_entry_that_others_can_write_is_refused(folder: Path) -> None:
    digest = fill(folder / "s")
    for path, read in (
        (folder.joinpath("s", *record_parts("program", KEY)), lambda store: store.read_record("program", KEY)),
        (folder / "s" / "blobs" / digest[:2] / digest, lambda store: store.read_blob(digest)),
    ):
        path.chmod(0o666)
        with pytest.raises(UntrustedArtifact, match="others than its owner can write it \\(mode 0666\\)"):
            read(DiskStore(folder / "s"))
        path.chmod(0o644)
        read(DiskStore(folder / "s"))


@needs_root
def test_what_another_user_wrote_is_refused_with_the_command_that_signs_it(folder: Path) -> None:
    digest = fill(folder / "s")
    (folder / "s").chmod(0o755)

    def as_another_user() -> str:
        with pytest.raises(UntrustedArtifact) as caught:
            DiskStore(folder / "s", read_only=True).read_blob(digest)
        return str(caught.value)

    text = run_as(NOBODY, as_another_user)
    assert "belongs to user 0, and this process runs as user 65534" in text
    assert f"`piecework store sign --store {folder / 's'} --key FILE.key`" in text
    give_to(NOBODY, folder / "s")  # and root does not run what another user wrote
    with pytest.raises(UntrustedArtifact, match="belongs to user 65534"):
        DiskStore(folder / "s").read_blob(digest)


@needs_root
def test_one_foreign_file_in_an_own_folder_is_refused(folder: Path) -> None:
    digest = fill(folder / "s")
    os.chown(folder / "s" / "blobs" / digest[:2] / digest, NOBODY, NOBODY)
    with pytest.raises(UntrustedArtifact, match="belongs to user 65534"):
        DiskStore(folder / "s").read_blob(digest)
    assert DiskStore(folder / "s").write_blob(b"kernel") == digest  # moved aside and written anew
    assert DiskStore(folder / "s").read_blob(digest) == b"kernel"


def test_the_first_open_folder_is_named(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    assert find_open_folder(folder / "a" / "b", os.geteuid()) is None
    (folder / "a").chmod(0o775)
    path, reason = find_open_folder(folder / "a" / "b", os.geteuid()) or (Path(), "")
    assert path == folder / "a" and "mode 0775" in reason
    assert OwnFiles().name == "own"




def test_any_believes_every_right_digest(folder: Path) -> None:
    digest = fill(folder / "s")
    (folder / "s").chmod(0o777)
    store = DiskStore(folder / "s", trust=AnyFiles())
    assert store.read_blob(digest) == b"kernel" and str(store.kernel_path(digest)).startswith("/proc/self/fd/")
    (folder / "s" / "blobs" / digest[:2] / digest).write_bytes(b"other")
    with pytest.raises(ArtifactMissing):
        DiskStore(folder / "s", trust=AnyFiles()).read_blob(digest)


