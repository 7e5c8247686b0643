"""Remote stores over plain HTTP and folders, servers that hang, break off or lie, and names that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostile.remote_starts import filled, remote, start, warnings_of
from hostile.servers import endless_server, file_server, free_port, rude_server
from piecework.errors import ArtifactMissing, OptionError
from piecework.events import (
    ArtifactCompiled,
    Recorder,
    RecordHit,
    RecordMiss,
    StoreWarning,
    fan_out,
    ignore,
)
from piecework.store.carry import pull, push
from piecework.store.disk import DiskStore
from piecework.store.envelope import RECORD_WORD, encode_record, seal
from piecework.store.layout import record_parts
from piecework.store.link import Link
from piecework.store.remote import INDEX_WORD, RemoteStore
from piecework.store.trust import AnyFiles

pytest.importorskip("obstore")

def test_plain_http_serves_what_was_pushed_to_a_folder(tmp_path: Path) -> None:
    store = filled(tmp_path / "made")
    push(store, Link(f"file://{tmp_path}/web"))
    with file_server(tmp_path / "web") as address:
        seen = Recorder()
        taken = remote(tmp_path / "other", address, seen)
        start(taken, seen)
        assert seen.of(RecordHit) and not seen.of(ArtifactCompiled) and not seen.of(StoreWarning)
        assert not taken.writes_back
        assert pull(remote(tmp_path / "third", address)) == sorted(
            (kind, key) for kind in ("artifact", "program") for key in store.list_records(kind)
        )
        with pytest.raises(OptionError, match="takes no writes"):
            push(store, Link(address))
    assert warnings_of(seen) == []


HALF = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5000\r\n\r\nhalf of it"
FAULTY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("answer", [None, HALF, FAULTY, b"", b"not HTTP at all\r\n\r\n"])
def test_a_remote_that_hangs_or_breaks_off_is_left_alone(answer: bytes | None, tmp_path: Path) -> None:
    """One warning, one request; the start goes on without it, and asks nothing more."""
    with rude_server(answer) as (address, requests):
        seen = Recorder()
        link = Link(f"{address}?patience_s=0.2", observer=seen)
        store = RemoteStore(DiskStore(tmp_path, trust=AnyFiles(), observer=seen), link, observer=seen)
        start(store, seen)
        assert seen.of(ArtifactCompiled)
        assert len(seen.of(StoreWarning)) == 1
        assert seen.of(StoreWarning)[0].path == address
        assert warnings_of(seen)[0].endswith("; what is missing is made here")
        assert link.is_resting
        assert len(requests) == 1
    if answer is None:
        assert warnings_of(seen) == ["it was waited for 0.2 s in all; what is missing is made here"]


def test_a_remote_that_is_not_there_is_left_alone(tmp_path: Path) -> None:
    seen = Recorder()
    start(remote(tmp_path, f"http://127.0.0.1:{free_port()}", seen), seen)
    assert seen.of(ArtifactCompiled) and len(seen.of(StoreWarning)) == 1


def test_a_remote_that_dies_between_two_requests(tmp_path: Path) -> None:
    """Its records came, its blobs do not: what came is kept, the rest is made here."""
    store = filled(tmp_path / "made")
    push(store, Link(f"file://{tmp_path}/web"))
    with file_server(tmp_path / "web") as address:
        seen = Recorder()
        taken = remote(tmp_path / "other", address, seen)
        key = store.list_records("program")[0]
        group = key.partition(".")[0]
        assert taken.more_records("program", group) == [key]
    start(taken, seen)
    assert seen.of(ArtifactCompiled) and len(seen.of(StoreWarning)) == 1


@pytest.mark.parametrize("name", [["program", "../../x"], ["../kind", "key"], ["program", 3], "x", [1]])
def test_an_index_of_odd_names_leads_nowhere(name: Any, tmp_path: Path) -> None:
    """A hostile remote may list anything; what cannot be a record's name is not asked for."""
    store = filled(tmp_path / "made")
    push(store, Link(f"file://{tmp_path}/web"))
    key = store.list_records("program")[0]
    (tmp_path / "web/INDEX").write_bytes(seal(INDEX_WORD, json.dumps([["program", key], name]).encode()))
    with file_server(tmp_path / "web") as address:
        start(remote(tmp_path / "other", address))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "other", "web"]


def test_a_record_of_odd_content_is_a_miss(tmp_path: Path) -> None:
    """Whole by its digest, and of no sense."""
    store = filled(tmp_path / "made")
    push(store, Link(f"file://{tmp_path}/web"))
    key = store.list_records("program")[0]
    path = tmp_path / "web" / Path(*record_parts("program", key))
    for payload in ({"pieces": 3}, {"pieces": [{"artifacts": {"x": "../../../etc"}, "text": "?"}]}, {}):
        path.write_bytes(seal(RECORD_WORD, encode_record("program", key, payload)))
        seen = Recorder()
        taken = remote(tmp_path / f"other{len(payload)}{len(str(payload))}", f"file://{tmp_path}/web", seen)
        start(taken, seen)
        assert seen.of(RecordMiss) and not seen.of(RecordHit)
        taken.flush()  # else what was made would be written back over the next


def test_what_is_absent_is_asked_for_again_after_a_while(tmp_path: Path) -> None:
    """A long process finds what another one pushed meanwhile; a short one asks for nothing twice."""
    made = filled(tmp_path / "made")
    (tmp_path / "web").mkdir()
    key = made.list_records("artifact")[0]
    with file_server(tmp_path / "web") as address:
        stores = []
        for name, absent_s in (("patient", 60.0), ("eager", 0.0)):
            local = DiskStore(tmp_path / name, trust=AnyFiles())
            stores.append(RemoteStore(local, Link(address, patience_s=30.0), absent_s=absent_s))
        for store in stores:
            with pytest.raises(ArtifactMissing):
                store.read_record("artifact", key)
            assert store.more_records("program", "x") == []
        push(made, Link(f"file://{tmp_path}/web"))
        with pytest.raises(ArtifactMissing):
            stores[0].read_record("artifact", key)
        assert stores[1].read_record("artifact", key) == made.read_record("artifact", key)
        (program,) = made.list_records("program")
        group = program.partition(".")[0]
        assert stores[0].more_records("program", group) == []
        assert stores[1].more_records("program", group) == [program]


def test_a_push_of_some_keeps_the_others_in_the_index(tmp_path: Path) -> None:
    made = filled(tmp_path / "made")
    link = Link(f"file://{tmp_path}/web", patience_s=30.0)
    push(made, link)
    before = (tmp_path / "web/INDEX").read_bytes()
    (key, *_) = made.list_records("artifact")
    push(made, link, [("artifact", key)])
    assert (tmp_path / "web/INDEX").read_bytes() == before


def test_own_cannot_be_kept_with_a_remote(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="trust `own` cannot be kept") as error:
        RemoteStore(DiskStore(tmp_path), Link("s3://bucket/x"))
    assert "--trust signed" in error.value.hint


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://bucket/x?patience_s=-1", "s3://bucket/x?other=1"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(OptionError):
        Link(url)


def test_a_read_only_store_changes_nothing_anywhere(tmp_path: Path) -> None:
    store = filled(tmp_path / "made")
    push(store, Link(f"file://{tmp_path}/web"))
    before = sorted(path for path in (tmp_path / "web").rglob("*"))
    seen = Recorder()
    taken = remote(tmp_path / "other", f"file://{tmp_path}/web", seen, read_only=True)
    start(taken, seen)
    assert seen.of(RecordHit) and not seen.of(ArtifactCompiled)
    assert not (tmp_path / "other").exists()
    assert sorted(path for path in (tmp_path / "web").rglob("*")) == before


def test_observers_see_remote_reads(tmp_path: Path) -> None:
    store = filled(tmp_path / "made")
    push(store, Link(f"file://{tmp_path}/web"))
    seen = Recorder()
    taken = remote(tmp_path / "other", f"file://{tmp_path}/web", fan_out(seen, ignore))
    for key in store.list_records("program"):
        taken.read_record("program", key)
    kinds = [event.as_dict()["kind"] for event in seen.events if type(event).__name__ == "StoreRead"]
    assert kinds.count("program") == 1 and "artifact" in kinds and "blob" in kinds


def test_a_list_without_end_is_left_when_patience_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing goes on asking in the background when nobody waits any more."""
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "r"}.items():
        monkeypatch.setenv(name, value)
    with endless_server() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        seen = Recorder()
        link = Link("s3://bucket?patience_s=0.2", observer=seen)
        assert link.list("") is None and link.is_resting
        assert link._crew.settle()
        assert warnings_of(seen) == ["it was waited for 0.2 s in all; what is missing is made here"]
