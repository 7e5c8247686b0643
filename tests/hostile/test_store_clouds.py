"""Remote stores on Google's and Azure's protocols: what S3's tests show, with their own addresses and credentials."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.cloud_servers import CONTAINER, Cloud, azure_server, google_server
from hostile.remote_starts import filled, remote, start, warnings_of
from hostile.servers import rude_server
from piecework.errors import OptionError, StoreError
from piecework.events import ArtifactCompiled, ArtifactLoaded, Recorder, RecordHit, StoreWarning
from piecework.store.carry import pull, push
from piecework.store.disk import DiskStore
from piecework.store.keys import make_key, read_secret
from piecework.store.link import Link
from piecework.store.remote import RemoteStore
from piecework.store.signing import SignedRecords, sign_records
from piecework.store.trust import AnyFiles

pytest.importorskip("obstore")
SCHEMES = {"google": "gs", "azure": "az"}


@pytest.fixture(params=sorted(SCHEMES))
def cloud(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    (tmp_path / "account").mkdir()
    with google_server(tmp_path / "account") if request.param == "google" else azure_server() as cloud:
        for name, value in cloud.variables.items():
            monkeypatch.setenv(name, value)
        yield cloud


@pytest.fixture
def url(cloud: Cloud, request: pytest.FixtureRequest) -> str:
    return f"{SCHEMES[request.node.callspec.params['cloud']]}://{CONTAINER}/some/prefix"


def test_one_machine_makes_and_another_takes(cloud: Cloud, url: str, tmp_path: Path) -> None:
    first, seen = remote(tmp_path / "first", url), Recorder()
    start(first, seen)
    assert seen.of(ArtifactCompiled)
    assert first.flush(60.0) == 0
    assert cloud.objects and all(name.startswith("some/prefix/") for name in cloud.objects)
    seen = Recorder()
    start(remote(tmp_path / "second", url, seen), seen)
    assert not seen.of(ArtifactCompiled) and not seen.of(StoreWarning)
    assert [event.layer for event in seen.of(RecordHit)] == ["remote"]
    assert {event.layer for event in seen.of(ArtifactLoaded)} == {"remote"}


def test_what_was_pushed_and_signed_is_pulled_whole(cloud: Cloud, url: str, tmp_path: Path) -> None:
    """A listing takes several pages."""
    public = make_key(tmp_path / "ci.key")
    store = filled(tmp_path / "made")
    sign_records(store, read_secret(tmp_path / "ci.key"))
    pushed = push(store, Link(url, patience_s=30.0))
    assert len(cloud.objects) > 2 * 3
    writes = [each for each in cloud.requests if each.startswith("PUT") and "/blobs/" in each]
    assert push(store, Link(url, patience_s=30.0)) == pushed
    assert [each for each in cloud.requests if each.startswith("PUT") and "/blobs/" in each] == writes
    assert pull(remote(tmp_path / "other", url, trust=SignedRecords((public,)))) == pushed
    seen = Recorder()
    start(DiskStore(tmp_path / "other", trust=SignedRecords((public,))), seen)
    assert seen.of(RecordHit) and not seen.of(ArtifactCompiled)


def test_other_bytes_are_a_miss_that_names_the_object(cloud: Cloud, url: str, tmp_path: Path) -> None:
    push(filled(tmp_path / "made"), Link(url, patience_s=30.0))
    (path,) = [name for name in cloud.objects if "/records/program/" in name]
    cloud.objects[path] = cloud.objects[path][:-1]
    seen = Recorder()
    start(remote(tmp_path / "other", url, seen), seen)
    (warning,) = seen.of(StoreWarning)
    assert warning.path == f"{url.removesuffix('/some/prefix')}/{path}" and warning.reason.endswith("it was not read")


def test_credentials_that_are_refused_cost_one_warning(
    cloud: Cloud, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger").mkdir()
    with google_server(tmp_path / "stranger") as stranger:
        other = Path(stranger.variables["GOOGLE_SERVICE_ACCOUNT"])
        other.write_text(other.read_text().replace(stranger.address, cloud.address))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "YW5vdGhlcg==")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(other))
    seen = Recorder()
    start(remote(tmp_path / "first", url, seen), seen)
    assert seen.of(ArtifactCompiled)
    # One for what is read; what is written back is refused before or after that.
    assert 1 <= len(seen.of(StoreWarning)) <= 2 and all("403" in reason for reason in warnings_of(seen))
    with pytest.raises(StoreError, match="cannot be written: .*403") as error:
        Link(url).put([("a", b"b")])
    assert "come from the environment" in error.value.hint
    with pytest.raises(StoreError, match="cannot be listed"):
        push(DiskStore(tmp_path / "first", trust=AnyFiles()), Link(url))
    assert cloud.objects == {}


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"])
def test_one_that_hangs_or_fails_is_left_alone(
    answer: bytes | None, cloud: Cloud, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rude_server(answer) as (address, requests):
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", address)
        account = tmp_path / "account/account.json"
        if account.exists():
            account.write_text(account.read_text().replace(cloud.address, address))
        seen = Recorder()
        local = DiskStore(tmp_path / "folder", trust=AnyFiles(), read_only=True)
        start(RemoteStore(local, Link(f"{url}?patience_s=0.3", observer=seen), observer=seen), seen)
        assert seen.of(ArtifactCompiled) and len(seen.of(StoreWarning)) == 1 and len(requests) == 1
    assert cloud.requests == []


def test_no_credentials_at_all_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(OptionError, match="`az://container` cannot be opened: .*[Aa]ccount") as error:
        Link("az://container")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in error.value.hint
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "nowhere.json"))
    with pytest.raises(OptionError, match="`gs://bucket` cannot be opened: .*nowhere.json") as error:
        Link("gs://bucket")
    assert "GOOGLE_SERVICE_ACCOUNT" in error.value.hint


@pytest.mark.parametrize(
    "given",
    ["https://user:hunter2@host/path", "https://host/path?sv=1&sig=hunter2", "ftp://user:hunter2@host/x?sig=hunter2"],
)
def test_no_secret_of_an_address_is_shown(given: str) -> None:
    try:
        text = Link(given).url
    except OptionError as error:
        text = f"{error} {error.hint}"
    assert "hunter2" not in text and "host" in text


def test_the_process_ends_well_after_each_request(cloud: Cloud, url: str) -> None:
    """Native threads that come back into Python while it ends would abort it."""
    script = f"from piecework.store.link import Link\nLink({url!r}, patience_s=30.0).put([('a', b'b')])\n"
    running = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(4)]
    assert [(process.wait(), process.communicate()[1]) for process in running] == [(0, b"")] * 4
