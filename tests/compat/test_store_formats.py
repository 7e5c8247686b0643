"""Stores of every released format are read as they were written, and this release still writes its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("nacl")

from compat import sample
from piecework.store.archive import import_archive
from piecework.store.disk import DiskStore
from piecework.store.inventory import measure, verify
from piecework.store.layout import FORMAT
from piecework.store.signing import SignedRecords

HERE = Path(__file__).parent
FORMATS = sorted(path.name for path in HERE.glob("format*"))


def take(name: str, target: Path) -> Path:
    """Copy a sample with modes of its owner's alone: a checkout may leave files that a group can write."""
    shutil.copytree(HERE / name / "store", target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(store: DiskStore) -> None:
    """Read all of the sample, and compare it with what this release would write."""
    artifact, program = sample.fill(DiskStore(store.path.parent / "reference"))
    assert store.list_records("program", "a1b2c3d4") == [sample.PROGRAM_KEY]
    assert store.read_record("program", sample.PROGRAM_KEY) == program
    assert store.read_record("artifact", sample.ARTIFACT_KEY) == artifact
    assert store.read_record("probe", "machine") == {"isa": "avx2"}
    kernels = zip(artifact["kernels"].values(), (sample.KERNEL, sample.EMPTY), strict=True)
    for digest, data in ((artifact["text"], sample.TEXT), *kernels):
        assert store.read_blob(digest) == data and store.kernel_path(digest).read_bytes() == data


def test_each_format_has_a_sample() -> None:
    assert FORMATS == [f"format{number}" for number in range(1, FORMAT + 1)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_is_read_whole(name: str, tmp_path: Path) -> None:
    store = DiskStore(take(name, tmp_path / "store"), read_only=True, strict=True)
    check(store)
    assert verify(store) == [] and measure(store).blobs == 3


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_is_read_under_its_signatures(name: str, tmp_path: Path) -> None:
    trust = SignedRecords((sample.SECRET.public,), "sample")
    check(DiskStore(take(name, tmp_path / "store"), read_only=True, strict=True, trust=trust))


@pytest.mark.parametrize("name", FORMATS)
def test_an_archive_of_a_sample_is_imported(name: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    assert len(import_archive(store, HERE / name / "store.tar").records) == 3
    check(DiskStore(tmp_path / "store"))


def test_this_release_writes_its_format_byte_for_byte(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        sample.write_sample(tmp_path)
    finally:
        os.umask(mask)
    assert files_of(tmp_path) == files_of(HERE / f"format{FORMAT}")
