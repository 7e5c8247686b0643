"""What a store's tools meet that is no damage: foreign names, odd modes and numbers, links and pipes for files."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hostile.damage import NOBODY, find_victims, open_store, read_everything, write_all
from hostile.processes import open_folder, run_as
from piecework.errors import ArtifactMissing, OptionError
from piecework.events import Recorder, StoreWarning
from piecework.store import signing
from piecework.store.archive import export_archive, import_archive
from piecework.store.collect import collect
from piecework.store.disk import DiskStore
from piecework.store.envelope import seal
from piecework.store.inventory import list_stored, measure, verify
from piecework.store.keys import SecretKey
from piecework.store.lease import Lease
from piecework.store.owner import place
from piecework.store.trust import AnyFiles

SECRET = SecretKey(b"1" * 32, "k")


def use_every_tool(store: DiskStore, folder: Path) -> dict[str, Any]:
    """Do with a store what each command does."""
    return {
        "ls": len(list_stored(store)),
        "stat": sum(measure(store).records.values()),
        "verify": len(verify(store)),
        "export": len(export_archive(store, folder / "out.tar").records),
        "sign": len(signing.sign_records(store, SECRET)),
        "signed": list(signing.verify_records(store, signing.SignedRecords((SECRET.public,))).values()).count(""),
        "gc": collect(store).evicted,
    }


FOREIGN: tuple[bytes, ...] = (
    b"Program/zz/zzz.record", "é/zz/zzz.record".encode(), b"__pycache__/x/y.record", b".DS_Store/x", b"a b/zz/z.record",
    b"x" * 200 + b"/zz/z.record", "program/gr/é.record".encode(), b"program/gr/a b.record", b"program/gr/.record",
    b"program/gr/\xff\xfe.record", b"program/gr/" + b"x" * 240 + b".record", b"program/gr/\nx.record", b"README",
)  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN, ids=lambda name: str(name[:20]))
def test_what_other_programs_leave_among_records_is_passed_over(tmp_path: Path, name: bytes) -> None:
    store = open_store(tmp_path / "store")
    write_all(store)
    path = os.fsencode(store.path / "records") + b"/" + name
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(b"x")
    assert read_everything(store) == (26, 0)
    assert use_every_tool(store, tmp_path) == {
        "ls": 6, "stat": 6, "verify": 0, "export": 6, "sign": 6, "signed": 6, "gc": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [b"NaN", b"1e999", b"-Infinity", b"[" * 900 + b"]" * 900, b'"\\ud800"', b"9" * 4000],
    ids=["nan", "too large", "infinity", "deep", "half a letter", "long"],
)
def test_values_that_json_should_not_hold_go_through_every_tool(tmp_path: Path, value: bytes) -> None:
    store = DiskStore(tmp_path / "store", trust=AnyFiles())
    write_all(store)
    body = b'{"key":"group.one","kind":"program","payload":{"toolchain":' + value + b',"pieces":[1]}}'
    (store.path / "records/program/gr/group.one.record").write_bytes(seal("piecework-record", body))
    done = use_every_tool(store, tmp_path)
    assert done["ls"] == done["sign"] == done["export"] == done["signed"] == 6


def test_a_damaged_record_does_not_keep_the_others_from_being_signed(tmp_path: Path) -> None:
    seen = Recorder()
    write_all(open_store(tmp_path / "store"))
    store = open_store(tmp_path / "store", observer=seen)
    (store.path / "records/program/gr/group.one.record").write_bytes(b"damage")
    assert len(signing.sign_records(store, SECRET)) == 5
    assert [Path(warning.path).name for warning in seen.of(StoreWarning)] == ["group.one.record"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077, 0o277, 0o777], ids=oct)
def test_a_new_store_is_its_owners_alone_whatever_the_umask(mask: int) -> None:
    """With a group-writable folder above it, made by the store itself, it would refuse itself at the next start."""
    with open_folder() as folder:
        os.chown(folder, NOBODY, NOBODY)

        def work() -> list[Any]:
            os.umask(mask)
            root, seen = folder / "new" / "folders" / "store", Recorder()
            write_all(open_store(root, observer=seen))
            served = read_everything(open_store(root, observer=seen))
            modes = {path.stat().st_mode & 0o022 for path in [*root.parents[:2], root, *root.rglob("*")]}
            return [*served, sorted(modes), [warning.reason for warning in seen.of(StoreWarning)]]

        assert run_as(NOBODY, work) == [26, 0, [0], []]


@pytest.mark.parametrize("number", ["0", "9" * 30, "4194304000"])
def test_a_process_that_never_was_is_dead(tmp_path: Path, number: str) -> None:
    """Whoever may write the folder may write any number there."""
    store = open_store(tmp_path / "store")
    write_all(store)
    owner = f"{place()}-{number}-5"
    (store.path / "staging" / f"{owner}.abc").write_bytes(b"half")
    collect(store)
    folder = os.open(tmp_path, os.O_RDONLY)
    lease = Lease("work.lease", folder)
    (tmp_path / lease.name).write_bytes(f"{owner}.0011223344556677".encode())
    release = lease.attempt()
    if number != "0":
        assert release is not None and not (store.path / "staging" / f"{owner}.abc").exists()
        release()
    lease.close()


def test_export_replaces_no_pipe_and_no_device_and_goes_where_a_link_leads(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    write_all(store)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    for name in ("pipe", "device"):
        with pytest.raises(OptionError, match="is no plain file"):
            export_archive(store, tmp_path / name)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "device").is_symlink()
    (tmp_path / "link").symlink_to(tmp_path / "there.tar")
    for _ in range(2):
        export_archive(store, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there.tar").is_file()


def test_import_of_what_is_no_plain_file_is_told_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: whoever opens it carelessly waits for ever
    for path, reason in ((tmp_path / "pipe", "it is no plain file"), (tmp_path, "(it is no plain|Is a directory)")):
        with pytest.raises(OptionError, match=f"cannot be read: {reason}"):
            import_archive(open_store(tmp_path / "store"), path)


def test_a_folder_swapped_for_a_link_while_rubbish_goes_costs_nothing_elsewhere(tmp_path: Path) -> None:
    """Where others write the folder, they may swap it between two steps of who cleans up, who may be root."""
    store, finished = DiskStore(tmp_path / "store", trust=AnyFiles()), threading.Event()
    write_all(store)
    precious = tmp_path / "precious"
    for number in range(30):
        (precious / str(number)).mkdir(parents=True)
        (precious / str(number) / "data").write_bytes(b"x")
    quarantine = store.path / "quarantine"

    def swap() -> None:
        steps = (
            *(lambda number=number: (quarantine / str(number)).mkdir(parents=True) for number in range(30)),
            lambda: os.rename(quarantine, tmp_path / "aside"),
            lambda: os.symlink(precious, quarantine),
            lambda: os.unlink(quarantine),
            lambda: os.rename(tmp_path / "aside", quarantine),
        )
        while not finished.is_set():
            for step in steps:
                with suppress(OSError):  # the collector is at work in the same place
                    step()

    quarantine.mkdir()
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(150):
            collect(store, grace_s=-1.0)
    finally:
        finished.set()
        thread.join()
    assert len(list(precious.rglob("data"))) == 30


def test_a_large_blob_that_is_not_what_it_says_is_found_without_its_memory(tmp_path: Path) -> None:
    """A sparse file costs who plants it nothing, and who reads it all its memory."""
    with open_folder() as folder:
        write_all(open_store(folder / "store"))
        path = max(find_victims(folder / "store"), key=lambda each: each.stat().st_size)
        os.truncate(path, 400 << 20)

        def work() -> bool:
            import resource

            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
            try:
                open_store(folder / "store", trust=AnyFiles()).read_blob(path.name)
            except ArtifactMissing:
                return True
            return False

        assert run_as(os.geteuid(), work)
        assert not path.exists()


def test_a_path_that_none_may_have_is_told() -> None:
    with pytest.raises(OptionError, match="zero byte"):
        DiskStore("a\0b")
