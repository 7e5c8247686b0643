"""What both stores promise: blobs by digest, records last, the same misses."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from piecework.env import Environment, calm_openmp, read_variables
from piecework.errors import ArtifactMissing, OptionError, StoreError
from piecework.events import Recorder, StoreRead, StoreWrite
from piecework.store.disk import DiskStore
from piecework.store.layout import default_folder
from piecework.store.memory import MemoryStore
from piecework.store.protocol import SharedStore
from piecework.values.digest import digest_bytes


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryStore | DiskStore:
    return MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "store")


def test_a_blob_is_named_by_its_digest_and_kept_once(store: MemoryStore | DiskStore) -> None:
    recorder = store.observer = Recorder()
    first, second = store.write_blob(b"kernel"), store.write_blob(b"kernel")
    assert first == second == digest_bytes(b"kernel")
    assert store.read_blob(first) == b"kernel" and store.has_blob(first)
    assert len(recorder.of(StoreWrite)) == 1 and len(recorder.of(StoreRead)) == 1


def test_empty_and_large_blobs(store: MemoryStore | DiskStore) -> None:
    for data in (b"", os.urandom(3 << 20)):
        assert store.read_blob(store.write_blob(data)) == data


def test_a_record_comes_back_equal_and_is_nobodys_reference(store: MemoryStore | DiskStore) -> None:
    record = {"pieces": ["a", "b"], "count": 2, "none": None, "ratio": 0.5, "nested": {"é": [True]}}
    store.write_record("program", "group.key", record)
    record["pieces"].append("later")  # type: ignore[attr-defined]
    read = store.read_record("program", "group.key")
    assert read == {"pieces": ["a", "b"], "count": 2, "none": None, "ratio": 0.5, "nested": {"é": [True]}}
    read["count"] = 3  # type: ignore[index]
    assert store.read_record("program", "group.key")["count"] == 2


def test_a_record_is_replaced_listed_and_forgotten(store: MemoryStore | DiskStore) -> None:
    for key in ("ab.2", "ab.1", "abc.1", "zz"):
        store.write_record("program", key, {"key": key})
    store.write_record("program", "ab.1", {"key": "new"})
    store.write_record("artifact", "ab.9", {})
    assert store.list_records("program") == ["ab.1", "ab.2", "abc.1", "zz"]
    assert store.list_records("program", "ab") == ["ab.1", "ab.2"]
    assert store.list_records("program", "none") == [] and store.list_records("probe") == []
    assert store.read_record("program", "ab.1") == {"key": "new"}
    store.delete_record("program", "ab.1")
    store.delete_record("program", "ab.1")
    assert store.list_records("program", "ab") == ["ab.2"] and not store.has_record("program", "ab.1")


def test_what_is_not_there_is_missing(store: MemoryStore | DiskStore) -> None:
    digest = digest_bytes(b"never written")
    assert not store.has_blob(digest) and not store.has_blob("../../etc/passwd")
    for read in (
        lambda: store.read_blob(digest),
        lambda: store.read_record("program", "nothing"),
        lambda: store.read_blob("../../etc/passwd"),
        lambda: store.read_record("program", "../escape"),
        lambda: store.read_record("../x", "key"),
    ):
        with pytest.raises(ArtifactMissing):
            read()


@pytest.mark.parametrize("key", ["", "..", ".hidden", "a/b", "a\0b", "x" * 201, "é"])
def test_a_key_that_could_leave_its_folder_is_refused(store: MemoryStore | DiskStore, key: str) -> None:
    with pytest.raises(StoreError, match="is no key of a record"):
        store.write_record("program", key, {})


def test_what_is_not_plain_data_is_refused_at_once(store: MemoryStore | DiskStore) -> None:
    with pytest.raises(TypeError):
        store.write_record("program", "key", {"set": {1, 2}})
    with pytest.raises(ValueError):
        store.write_record("program", "key", {"nan": float("nan")})
    assert store.list_records("program") == []


def test_a_kernel_can_be_opened_by_the_linker(store: MemoryStore | DiskStore) -> None:
    library = next(Path(path) for path in _mapped_libraries() if "libm" in Path(path).name or "libc" in Path(path).name)
    digest = store.write_blob(library.read_bytes())
    path = store.kernel_path(digest)
    assert path == store.kernel_path(digest) and path.read_bytes() == library.read_bytes()
    assert ctypes.CDLL(str(path)) is not None


def _mapped_libraries() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if line.endswith((".so.6", ".so"))]


def test_single_flight_says_whose_work_it_is(store: SharedStore) -> None:
    with store.single_flight("work", lambda: False) as flight:
        assert flight.owned and flight.exclusive
    with store.single_flight("work", lambda: True) as flight:
        assert not flight.owned
    with pytest.raises(OSError, match="of the caller"), store.single_flight("work"):
        raise OSError("of the caller")
    with store.single_flight("work") as flight:
        assert flight.owned


def test_a_kernel_in_the_folder_is_the_blob_itself(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    digest = store.write_blob(b"code")
    assert store.kernel_path(digest) == tmp_path / "store" / "blobs" / digest[:2] / digest


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    DiskStore(tmp_path / "deep" / "store").write_record("probe", "key", {})
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("deep", "deep/store")] == [0o700, 0o700]
    assert sorted(os.listdir(tmp_path / "deep" / "store")) == ["FORMAT", "records", "staging"]
    assert os.listdir(tmp_path / "deep" / "store" / "staging") == []


def test_the_default_folder_takes_plain_values() -> None:
    assert default_folder("/var/cache", "/home/me") == Path("/var/cache/piecework/store")
    assert default_folder("relative", "/home/me", "linux") == Path("/home/me/.cache/piecework/store")
    assert default_folder("", "/Users/me", "darwin") == Path("/Users/me/Library/Caches/piecework/store")
    with pytest.raises(OptionError, match="no folder for the store"):
        default_folder("", "")


def test_the_environment_is_read_once_into_plain_values() -> None:
    given = {"HOME": "/h", "PIECEWORK_STORE": "/s", "PIECEWORK_STORE_READ_ONLY": "Yes", "PIECEWORK_DEBUG": "0"}
    assert Environment.read(given) == Environment(home="/h", store="/s", store_read_only=True)
    assert Environment.read({}) == Environment()
    with pytest.raises(OptionError, match="neither true nor false"):
        Environment.read({"PIECEWORK_STRICT": "perhaps"})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"GOMP_SPINCOUNT": "2000"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_threads_that_wait_sleep_unless_the_user_said_how(given: dict[str, str], wanted: dict[str, str]) -> None:
    calm_openmp(given)
    assert given == wanted
    assert read_variables(["B", "A", "C"], {"A": "1", "B": "", "C": "3"}) == {"A": "1", "C": "3"}
    assert Environment.read().home == os.environ.get("HOME", "")
