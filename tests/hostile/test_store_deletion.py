"""Deleting and collecting under readers and writers."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from pathlib import Path

import pytest

from hostile.pieces import PIECES, compile_piece, content_of, start_cold
from hostile.processes import fork, wait
from piecework.errors import ArtifactMissing
from piecework.store.collect import collect
from piecework.store.disk import DiskStore


def test_deleting_the_folder_under_a_reader_and_a_writer(tmp_path: Path) -> None:
    root, stop = tmp_path / "store", tmp_path / "stop"

    def work() -> None:
        store = DiskStore(root)
        while not stop.exists():
            digest = store.write_blob(content_of("piece0"))
            store.write_record("artifact", "piece0", {"blob": digest, "piece": "piece0"})
            try:
                assert store.read_blob(store.read_record("artifact", "piece0")["blob"]) == content_of("piece0")
            except ArtifactMissing:
                pass

    children = [fork(work) for _ in range(2)]
    for number in range(30):
        time.sleep(0.005)
        if root.exists():
            gone = tmp_path / f"gone{number}"
            os.rename(root, gone)
            shutil.rmtree(gone, ignore_errors=True)
    stop.touch()
    assert [wait(child) for child in children] == [0, 0]
    start_cold(DiskStore(root), tmp_path / "log", PIECES)


def test_collecting_under_readers_and_writers(tmp_path: Path) -> None:
    root, stop, log = tmp_path / "store", tmp_path / "stop", tmp_path / "log"

    def work(number: int) -> None:
        store = DiskStore(root, strict=True)
        while not stop.exists():
            piece = PIECES[number % len(PIECES)]
            number += 1
            with store.hold("artifact", piece):
                try:
                    record = store.read_record("artifact", piece)
                    assert store.read_blob(record["blob"]) == content_of(piece)
                except ArtifactMissing:
                    compile_piece(store, piece, log)

    children = [fork(lambda number=number: work(number)) for number in range(3)]
    evicted = 0
    while evicted < 20:
        evicted += len(collect(DiskStore(root), max_bytes=0, grace_s=0.0).evicted)
    stop.touch()
    assert [wait(child) for child in children] == [0, 0, 0]
    start_cold(DiskStore(root, strict=True), log, PIECES)


def test_a_loaded_kernel_outlives_its_folder(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    maps = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    library = next(Path(path) for path in maps if Path(path).name.startswith("libm."))
    digest = store.write_blob(library.read_bytes())
    loaded = ctypes.CDLL(str(store.kernel_path(digest)))
    shutil.rmtree(tmp_path / "store")
    loaded.cos.restype, loaded.cos.argtypes = ctypes.c_double, [ctypes.c_double]
    assert loaded.cos(0.0) == 1.0
    with pytest.raises(ArtifactMissing):
        store.read_blob(digest)
    assert store.read_blob(store.write_blob(b"again")) == b"again"
