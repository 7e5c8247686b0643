"""A stand-in for compiling: pieces whose artifacts follow from their names, and a start that makes what is missing."""

from __future__ import annotations

import time
from pathlib import Path

from hostile.processes import append
from piecework.store.disk import DiskStore

PIECES = [f"piece{index}" for index in range(5)]


def content_of(piece: str) -> bytes:
    """Return what compiling a piece gives, which follows from its name."""
    return (piece.encode() + b" ") * 3000


def compile_piece(store: DiskStore, piece: str, log: Path) -> None:
    """Do what a compile does: note that it ran, take a while, write the blob and then the record."""
    append(log, piece)
    time.sleep(0.003)
    digest = store.write_blob(content_of(piece))
    store.write_record("artifact", piece, {"blob": digest, "piece": piece})


def is_compiled(store: DiskStore, piece: str) -> bool:
    """Tell whether a piece is stored with all that it refers to: a record may outlive a blob that was deleted."""
    return store.has_record("artifact", piece) and store.has_blob(store.read_record("artifact", piece)["blob"])


def start_cold(store: DiskStore, log: Path, order: list[str]) -> None:
    """Compile what is not there, once among all processes, and read everything."""
    for piece in order:
        with store.single_flight(piece, lambda piece=piece: is_compiled(store, piece)) as flight:
            if flight.owned:
                compile_piece(store, piece, log)
    for piece in PIECES:
        record = store.read_record("artifact", piece)
        assert record["piece"] == piece and store.read_blob(record["blob"]) == content_of(piece)
