"""Ways to damage a store, each chosen by a seeded random generator."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piecework.errors import ArtifactMissing
from piecework.store.disk import DiskStore
from piecework.store.envelope import RECORD_WORD, encode_record, seal

KERNELS = (b"", b"\x7fELF kernel one " * 300, b"\x7fELF kernel two " * 5, bytes(range(256)) * 40)
NOBODY = 65534


def check_program(key: str, record: Mapping[str, Any]) -> str:
    """Say what a program record lacks."""
    return "" if record["pieces"] and all(record["pieces"]) else "it has no pieces"


def open_store(path: Path, **options: Any) -> DiskStore:
    """Open a store that knows what a program record must have."""
    return DiskStore(path, checks={"program": check_program}, **options)


def write_all(store: DiskStore) -> dict[str, Any]:
    """Write what every damaged store held before; return the program record."""
    pieces = []
    for index, kernel in enumerate(KERNELS):
        digest = store.write_blob(kernel)
        store.write_record("artifact", f"{index}{digest[:20]}", {"kernels": {"k": digest}, "text": "x = 1\n" * 20})
        pieces.append({"artifact": f"{index}{digest[:20]}", "blob": digest})
    record = {"pieces": pieces, "toolchain": {"torch": "2.13"}}
    store.write_record("program", "group.one", record)
    store.write_record("program", "group.two", record | {"model": "another"})
    return record


def read_everything(store: DiskStore) -> tuple[int, int]:
    """Read as a start does; every byte that comes back is right; return how many reads served and how many missed."""
    outcomes: Counter[bool] = Counter()
    for key in store.list_records("program", "group"):
        try:
            record = store.read_record("program", key)
            assert record["toolchain"] == {"torch": "2.13"} and len(record["pieces"]) == len(KERNELS)
            assert ("model" in record) == (key == "group.two")
            outcomes[True] += 1
        except ArtifactMissing:
            outcomes[False] += 1
            continue
        for index, piece in enumerate(record["pieces"]):
            for read in (
                lambda piece=piece: store.read_record("artifact", piece["artifact"])["kernels"]["k"] == piece["blob"],
                lambda piece=piece, index=index: store.read_blob(piece["blob"]) == KERNELS[index],
                lambda piece=piece, index=index: store.kernel_path(piece["blob"]).read_bytes() == KERNELS[index],
            ):
                try:
                    assert read()
                    outcomes[True] += 1
                except ArtifactMissing:
                    outcomes[False] += 1
    return outcomes[True], outcomes[False]


def flip(path: Path, chance: random.Random) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    if not data:
        data = bytearray(b"\0")
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    """Cut somewhere, ends included."""
    size = path.stat().st_size
    os.truncate(path, chance.choice([0, 1, max(size - 1, 0), chance.randrange(size + 1)]))


def extend(path: Path, chance: random.Random) -> None:
    """Add bytes behind."""
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.choice([1, 64, 5000])))


def swap(path: Path, chance: random.Random) -> None:
    """Put another entry's bytes here: right in themselves, wrong in this place."""
    root = next(parent for parent in path.parents if (parent / "staging").exists())
    others = [other for other in sorted(root.rglob("*")) if _is_small(other) and other != path]
    shutil.copyfile(chance.choice(others), path)


def replace_by_folder(path: Path, chance: random.Random) -> None:
    """Put a folder here, empty or not."""
    path.unlink()
    path.mkdir()
    if chance.random() < 0.5:
        (path / "inside").write_bytes(b"x")


def replace_by_pipe(path: Path, chance: random.Random) -> None:
    """Put a pipe here, which hangs whoever opens it carelessly."""
    path.unlink()
    os.mkfifo(path)


def replace_by_socket(path: Path, chance: random.Random) -> None:
    """Put a socket here."""
    path.unlink()
    where = os.getcwd()
    os.chdir(path.parent)  # the address of a socket has 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind("s")
        os.rename("s", path)
    finally:
        os.chdir(where)


def replace_by_link(path: Path, chance: random.Random) -> None:
    """Put a link here: out of the store, to the right bytes elsewhere, to itself, or to nothing."""
    elsewhere = path.parents[3] / f"outside-{chance.randrange(10**9)}"
    shutil.copyfile(path, elsewhere)
    path.unlink()
    path.symlink_to(chance.choice([elsewhere, Path("/etc/passwd"), Path("/dev/zero"), path, Path("/nowhere")]))


def replace_folder_by_link(path: Path, chance: random.Random) -> None:
    """Move a folder of the store elsewhere and link to it."""
    folder = chance.choice([path.parent, path.parents[1]])
    elsewhere = path.parents[3] / f"outside-{chance.randrange(10**9)}"
    os.rename(folder, elsewhere)
    folder.symlink_to(elsewhere)


def replace_folder_by_file(path: Path, chance: random.Random) -> None:
    """Put a file where a folder of the store was."""
    shutil.rmtree(path.parent)
    path.parent.write_bytes(b"not a folder")


def remove(path: Path, chance: random.Random) -> None:
    """Delete the entry, or all of a folder."""
    if chance.random() < 0.3:
        shutil.rmtree(path.parents[chance.randrange(2)])
    else:
        path.unlink()


def write_nonsense(path: Path, chance: random.Random) -> None:
    """Put bytes here that never were an entry."""
    head = chance.choice([b"", b"\x80\x04", b"PK\x03\x04", b"piecework-record 1 ", b"{", b"[" * 5000, b"\0" * 8192])
    path.write_bytes(head + chance.randbytes(chance.randrange(300)))


def forge_record(path: Path, chance: random.Random) -> None:
    """Write a record whose digest is right and whose content is not what it should be."""
    payload = chance.choice([{}, {"pieces": []}, {"pieces": [{}]}, {"pieces": None}, {"pieces": 3}])
    body = encode_record("program", chance.choice(["group.one", "other"]), payload)
    bodies = [body, b"[1]", b"{}", b"null", b'{"kind":1,"key":2,"payload":3}', b"[" * 100_000, b"\xff\xfe", b""]
    path.write_bytes(seal(RECORD_WORD, chance.choice(bodies)))


def make_sparse(path: Path, chance: random.Random) -> None:
    """Claim a size that no memory holds."""
    os.truncate(path, 1 << 40)


def leave_rubbish(path: Path, chance: random.Random) -> None:
    """Leave half-written and foreign files about, as a killed writer or another program would."""
    root = next(parent for parent in path.parents if (parent / "staging").exists())
    for name in (".DS_Store", "x.tmp", "group.one.record.tmp", "group.zz.record~"):
        (path.parent / name).write_bytes(path.read_bytes()[:10])
    (root / "staging" / "0-1-2.abc").write_bytes(b"half")


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip, flip, truncate, truncate, extend, swap, replace_by_folder, replace_by_pipe, replace_by_socket,
    replace_by_link, replace_folder_by_link, replace_folder_by_file, remove, write_nonsense, forge_record, make_sparse,
    leave_rubbish,
)  # fmt: skip


def find_victims(root: Path) -> list[Path]:
    """Return the entries that can be damaged, in order."""
    return [path for top in ("blobs", "records") for path in sorted((root / top).rglob("*")) if _is_small(path)]


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20


def give_to(user: int, root: Path) -> None:
    """Make a folder and all in it another user's, links as they are."""
    for path in [root, *root.rglob("*")]:
        if not stat.S_ISLNK(path.lstat().st_mode):
            os.chown(path, user, user)
