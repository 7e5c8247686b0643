"""Remote stores on a real S3 server: written back, read through, signed, replayed, and with other bytes."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.remote_starts import filled, remote, start, warnings_of
from hostile.servers import s3_server
from piecework.errors import ArtifactMissing, StoreError, UntrustedArtifact
from piecework.events import (
    ArtifactCompiled,
    ArtifactLoaded,
    ArtifactReused,
    Recorder,
    RecordHit,
    StoreWarning,
)
from piecework.store.carry import pull, push
from piecework.store.disk import DiskStore
from piecework.store.keys import make_key, read_secret
from piecework.store.layout import blob_parts, record_parts
from piecework.store.link import Link
from piecework.store.references import blobs_of
from piecework.store.remote import RemoteStore
from piecework.store.signing import SignedRecords, sign_records
from piecework.store.trust import AnyFiles

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("moto.server")
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket; the environment says where the server is, as it does for every S3 client."""
    name = f"bucket{abs(hash(request.node.name)) % 10**9}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT"), timeout=30).read()
    for variable, value in {
        "AWS_ENDPOINT_URL": server, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    return f"s3://{name}/some/prefix"


def test_one_machine_makes_and_another_takes(bucket: str, tmp_path: Path) -> None:
    """Written back in the background by a cold start; a start elsewhere compiles nothing, and then needs no remote."""
    first, seen = remote(tmp_path / "first", bucket), Recorder()
    start(first, seen)
    assert seen.of(ArtifactCompiled)
    assert first.flush(60.0) == 0
    seen = Recorder()
    start(remote(tmp_path / "second", bucket, seen), seen)
    assert not seen.of(ArtifactCompiled) and not seen.of(StoreWarning)
    assert [event.layer for event in seen.of(RecordHit)] == ["remote"]
    assert {event.layer for event in seen.of(ArtifactLoaded)} == {"remote"}
    seen = Recorder()
    start(RemoteStore(DiskStore(tmp_path / "second", trust=AnyFiles()), Link("s3://no-such-bucket/x")), seen)
    assert [event.layer for event in seen.of(RecordHit)] == ["disk"]
    start(DiskStore(tmp_path / "second"), seen)
    assert not seen.of(ArtifactCompiled)


def test_what_another_process_compiled_is_written_back(bucket: str, tmp_path: Path) -> None:
    store = filled(tmp_path / "first")
    (key,) = store.list_records("program")
    first = remote(tmp_path / "first", bucket, read_only=False)
    first.write_back(key)
    assert first.flush(60.0) == 0
    seen = Recorder()
    start(remote(tmp_path / "second", bucket, seen), seen)
    assert seen.of(RecordHit) and not seen.of(ArtifactCompiled) and not seen.of(StoreWarning)


def test_an_artifact_serves_a_program_that_is_new(bucket: str, tmp_path: Path) -> None:
    store = filled(tmp_path / "made")
    push(store, Link(bucket), [("artifact", key) for key in store.list_records("artifact")])
    seen = Recorder()
    start(remote(tmp_path / "other", bucket, seen), seen)
    assert not seen.of(RecordHit)
    assert seen.of(ArtifactReused) and not seen.of(ArtifactCompiled)
    assert {event.layer for event in seen.of(ArtifactReused)} == {"remote"}


def test_what_was_pushed_is_pulled_whole(bucket: str, tmp_path: Path) -> None:
    store = filled(tmp_path / "made")
    pushed = push(store, Link(bucket))
    assert push(store, Link(bucket)) == pushed
    other = remote(tmp_path / "other", bucket, read_only=False)
    assert pull(other) == pushed
    seen = Recorder()
    start(DiskStore(tmp_path / "other"), seen)
    assert seen.of(RecordHit) and not seen.of(ArtifactCompiled)
    with pytest.raises(ArtifactMissing, match="holds none of `no-such-key`"):
        pull(other, ["no-such-key"])


def test_a_signed_store_is_believed_by_its_key_alone(bucket: str, tmp_path: Path) -> None:
    keys = [make_key(tmp_path / name) for name in ("ci.key", "other.key")]
    store = filled(tmp_path / "made")
    push(store, Link(bucket))
    with pytest.raises(UntrustedArtifact, match="it is not signed"):
        start(remote(tmp_path / "a", bucket, trust=SignedRecords((keys[0],))))
    sign_records(store, read_secret(tmp_path / "ci.key"))
    push(store, Link(bucket))
    seen = Recorder()
    signed = remote(tmp_path / "b", bucket, trust=SignedRecords((keys[0],)))
    start(signed, seen)
    assert seen.of(RecordHit) and not seen.of(ArtifactCompiled)
    assert not signed.writes_back
    seen = Recorder()
    start(DiskStore(tmp_path / "b", trust=SignedRecords((keys[0],))), seen)
    assert seen.of(RecordHit)
    with pytest.raises(UntrustedArtifact, match="not by a trusted key"):
        start(remote(tmp_path / "c", bucket, trust=SignedRecords((keys[1],))))


def test_an_old_signed_record_under_another_key_is_refused(bucket: str, tmp_path: Path) -> None:
    """Whoever can write to the bucket puts a record that was signed once in the place of another one."""
    public = make_key(tmp_path / "ci.key")
    store = filled(tmp_path / "made")
    old, target = store.list_records("artifact")[0], "0" * 64
    sign_records(store, read_secret(tmp_path / "ci.key"))
    push(store, Link(bucket))
    link = Link(bucket)
    paths = {name: ["/".join(record_parts("artifact", key)) for key in (old, target)] for name in ("record",)}
    beside = [path.replace("records/", "signatures/").replace(".record", ".sig") for path in paths["record"]]
    found = link.fetch([paths["record"][0], beside[0]], 1 << 20)
    signatures = found[beside[0]]
    body = found[paths["record"][0]]
    assert body is not None and signatures is not None
    link.put([(paths["record"][1], body), (beside[1], signatures)])
    with pytest.raises(UntrustedArtifact, match="its signature was made for the record"):
        remote(tmp_path / "other", bucket, trust=SignedRecords((public,))).read_record("artifact", target)


@pytest.mark.parametrize("what", ["program", "artifact", "blob"])
@pytest.mark.parametrize("change", ["flip", "cut", "empty"])
def test_other_bytes_are_a_miss_that_names_the_object(what: str, change: str, bucket: str, tmp_path: Path) -> None:
    store = filled(tmp_path / "made")
    push(store, Link(bucket))
    key = store.list_records("artifact" if what == "artifact" else "program")[0]
    kind = "artifact" if what == "artifact" else "program"
    digest = sorted(blobs_of(kind, store.read_record(kind, key)))[0]
    path = "/".join(blob_parts(digest) if what == "blob" else record_parts(kind, key))
    link = Link(bucket)
    data = link.fetch([path], 1 << 20)[path]
    assert data
    middle = len(data) // 2
    changed = {"flip": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :], "cut": data[:-1], "empty": b""}
    link.put([(path, changed[change])])
    seen = Recorder()
    start(remote(tmp_path / "other", bucket, seen), seen)
    assert seen.of(ArtifactCompiled) or seen.of(ArtifactReused)
    assert [event.path for event in seen.of(StoreWarning)] == [f"{link.url}/{path}"]
    assert warnings_of(seen)[0].endswith("it was not read")


def test_what_cannot_be_written_back_is_told_once(bucket: str, tmp_path: Path) -> None:
    seen = Recorder()
    nowhere = bucket.replace("/some/prefix", "-that-is-not-there/x")
    store = remote(tmp_path, nowhere, seen)
    start(store, seen)
    assert store.flush(60.0) > 0
    assert [reason for reason in warnings_of(seen) if reason.startswith("what is made here is not written to it")]
    with pytest.raises(StoreError, match="cannot be listed"):
        push(DiskStore(tmp_path, trust=AnyFiles()), Link(nowhere))


def test_the_command_line_pushes_pulls_and_starts(bucket: str, tmp_path: Path) -> None:
    store = filled(tmp_path / "made")
    count = len(store.list_records("artifact"))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "piecework"), "store", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("push", bucket, "--store", str(store.path))
    assert done.stdout == f"pushed {count} artifact, 1 program\n", done.stderr
    refused = run("pull", bucket, "--store", str(tmp_path / "other"))
    assert refused.returncode == 2 and "--trust signed" in refused.stderr
    done = run("pull", bucket, "--store", str(tmp_path / "other"), "--trust", "any")
    assert done.stdout == f"pulled {count} artifact, 1 program\n", done.stderr
    looked = run("ls", "--store", bucket, "--trust", "any")
    assert looked.returncode == 2 and "is a remote store" in looked.stderr


