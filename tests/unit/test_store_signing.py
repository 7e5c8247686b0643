"""Signed records: who signed what, and what a signature does not cover any more."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.damage import NOBODY
from hostile.processes import open_folder, run_as
from piecework.errors import OptionError, UntrustedArtifact
from piecework.store.disk import DiskStore
from piecework.store.layout import record_parts, signature_parts

pytest.importorskip("nacl")

from piecework.store import keys, signing

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


def signed(path: Path, *trusted: keys.PublicKey, policy: str = signing.DEFAULT_POLICY) -> DiskStore:
    """Open a store that believes what the keys given signed."""
    return DiskStore(path, trust=signing.SignedRecords(trusted, policy))


@pytest.fixture
def secret(tmp_path: Path) -> keys.SecretKey:
    keys.make_key(tmp_path / "ci.key")
    return keys.read_secret(tmp_path / "ci.key")




def test_a_signed_store_loads_and_an_unsigned_one_does_not(folder: Path, secret: keys.SecretKey) -> None:
    digest = fill(folder / "s")
    with pytest.raises(UntrustedArtifact, match="`group.one` is not loaded: it is not signed") as caught:
        signed(folder / "s", secret.public).read_record("program", KEY)
    assert "piecework store sign" in caught.value.hint and caught.value.exit_code == 5
    assert signing.sign_records(DiskStore(folder / "s"), secret) == [("artifact", "a1"), ("program", KEY)]
    store = signed(folder / "s", secret.public)
    with pytest.raises(UntrustedArtifact, match="no signed record that was read refers to it"):
        store.read_blob(digest)
    assert store.read_record("program", KEY)["artifacts"] == ["a1"]
    assert store.read_record("artifact", "a1")["kernels"] == {"k": digest}
    assert store.read_blob(digest) == b"kernel"
    assert store.kernel_path(digest).read_bytes() == b"kernel"


def test_another_key_and_a_wrong_signature_are_refused(folder: Path, secret: keys.SecretKey) -> None:
    fill(folder / "s")
    signing.sign_records(DiskStore(folder / "s"), secret)
    other = keys.SecretKey(os.urandom(32))
    with pytest.raises(UntrustedArtifact, match=f"signed by `{secret.public.id}`, and not by a trusted key"):
        signed(folder / "s", other.public).read_record("program", KEY)
    path = folder.joinpath("s", *signature_parts("program", KEY))
    envelope = json.loads(path.read_text())
    envelope["signatures"][0]["sig"] = base64.b64encode(other.sign(b"anything")).decode()
    path.write_text(json.dumps(envelope))
    with pytest.raises(UntrustedArtifact, match="its signature is wrong"):
        signed(folder / "s", secret.public).read_record("program", KEY)


def test_a_record_that_changed_or_was_replayed_is_refused(folder: Path, secret: keys.SecretKey) -> None:
    fill(folder / "s")
    DiskStore(folder / "s").write_record("program", "group.new", {"artifacts": [], "toolchain": None})
    signing.sign_records(DiskStore(folder / "s"), secret)
    store, places = DiskStore(folder / "s"), {}
    for key in (KEY, "group.new"):
        places[key] = [folder.joinpath("s", *parts("program", key)) for parts in (record_parts, signature_parts)]
    old_signature = places[KEY][1].read_bytes()
    store.write_record("program", KEY, {"artifacts": ["planted"]})
    assert not places[KEY][1].exists()  # a new record needs a new signature
    places[KEY][1].write_bytes(old_signature)
    with pytest.raises(UntrustedArtifact, match="it changed after it was signed"):
        signed(folder / "s", secret.public).read_record("program", KEY)
    for source, target in zip(places["group.new"], places[KEY], strict=True):
        shutil.copyfile(source, target)  # a whole signed record under another key
    with pytest.raises(UntrustedArtifact, match="its signature was made for the record `group.new`"):
        signed(folder / "s", secret.public).read_record("program", KEY)


def test_a_signature_binds_the_policy(folder: Path, secret: keys.SecretKey) -> None:
    fill(folder / "s")
    signing.sign_records(DiskStore(folder / "s"), secret, "staging")
    with pytest.raises(UntrustedArtifact, match="signed for the policy `staging`, not for `production`"):
        signed(folder / "s", secret.public, policy="production").read_record("program", KEY)
    assert signed(folder / "s", secret.public, policy="staging").has_record("program", KEY)


@pytest.mark.parametrize("field", ["kind", "key", "record", "blobs", "toolchain", "policy"])
def test_every_field_of_the_statement_is_compared(folder: Path, secret: keys.SecretKey, field: str) -> None:
    fill(folder / "s")
    store = DiskStore(folder / "s")
    body, _ = store.entries.read_body(record_parts("artifact", "a1"), "artifact", "a1")
    statement = signing.make_statement("artifact", "a1", body, signing.DEFAULT_POLICY)
    statement[field] = ["0" * 64] if field == "blobs" else "other"
    payload = json.dumps(statement).encode()
    signature = secret.sign(signing.pre_authentication_encoding(signing.PAYLOAD_TYPE, payload))
    envelope = {
        "payloadType": signing.PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": secret.public.id, "sig": base64.b64encode(signature).decode()}],
    }
    with pytest.raises(UntrustedArtifact, match="is not loaded: it"):
        signing.SignedRecords((secret.public,)).check_record("artifact", "a1", body, json.dumps(envelope).encode())


NO_ENVELOPES = [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b"null", b'"x"', b'{"payloadType":1,"payload":""}']


@pytest.mark.parametrize("data", NO_ENVELOPES)
def test_a_damaged_signature_file_is_refused(folder: Path, secret: keys.SecretKey, data: bytes) -> None:
    fill(folder / "s")
    signing.sign_records(DiskStore(folder / "s"), secret)
    folder.joinpath("s", *signature_parts("program", KEY)).write_bytes(data)
    with pytest.raises(UntrustedArtifact, match="its signature file is damaged"):
        signed(folder / "s", secret.public).read_record("program", KEY)


def test_two_signers_and_either_is_enough(folder: Path, secret: keys.SecretKey) -> None:
    fill(folder / "s")
    other = keys.SecretKey(os.urandom(32))
    for signer in (secret, other, secret):
        signing.sign_records(DiskStore(folder / "s"), signer)
    envelope = json.loads(folder.joinpath("s", *signature_parts("program", KEY)).read_text())
    assert len(envelope["signatures"]) == 2
    for signer in (secret, other):
        assert signed(folder / "s", signer.public).has_record("program", KEY)
    assert set(signing.verify_records(DiskStore(folder / "s"), signing.SignedRecords((other.public,))).values()) == {""}


def test_a_process_believes_what_it_wrote_itself_and_nobody_elses(folder: Path, secret: keys.SecretKey) -> None:
    store = signed(folder / "s", secret.public)
    digest = store.write_blob(b"mine")
    store.write_record("artifact", "mine", {"blob": digest})
    assert store.read_record("artifact", "mine") == {"blob": digest} and store.read_blob(digest) == b"mine"
    DiskStore(folder / "s").write_record("artifact", "mine", {"blob": digest, "planted": True})
    with pytest.raises(UntrustedArtifact, match="it is not signed"):
        store.read_record("artifact", "mine")


@needs_root
def test_an_image_baked_by_root_is_loaded_by_another_user_when_signed(folder: Path, secret: keys.SecretKey) -> None:
    digest = fill(folder / "s")
    signing.sign_records(DiskStore(folder / "s"), secret)
    (folder / "s").chmod(0o755)

    def as_another_user() -> str:
        store = signed(folder / "s", secret.public)
        store.read_record("program", KEY)
        store.read_record("artifact", "a1")
        assert store.read_blob(digest) == b"kernel"
        return str(store.kernel_path(digest))

    assert run_as(NOBODY, as_another_user) == str(folder / "s" / "blobs" / digest[:2] / digest)
    (folder / "s").chmod(0o777)  # others could change the kernel after it was verified: it is loaded from memory
    assert run_as(NOBODY, as_another_user).startswith("/proc/self/fd/")


def test_keys_are_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    public = keys.make_key(tmp_path / "ci.key", "ci@fleet")
    assert (tmp_path / "ci.key").stat().st_mode & 0o777 == 0o600
    assert keys.read_secret(tmp_path / "ci.key").public.data == public.data
    assert keys.parse_public((tmp_path / "ci.pub").read_text()) == public == keys.parse_public(str(public))
    secret = keys.read_secret(tmp_path / "ci.key")
    assert base64.b64encode(secret.seed).decode() not in repr(secret) and repr(secret) == f"SecretKey({public.id})"
    with pytest.raises(OptionError, match="exists"):
        keys.make_key(tmp_path / "ci.key")
    (tmp_path / "ci.key").chmod(0o640)
    with pytest.raises(UntrustedArtifact, match="can be read by others"):
        keys.read_secret(tmp_path / "ci.key")
    for text in ("", "piecework-ed25519", "piecework-ed25519 AAAA", "ssh-ed25519 AAAA x", "piecework-ed25519 !! x"):
        with pytest.raises(OptionError):
            keys.parse_public(text)
    with pytest.raises(OptionError, match="holds no secret key"):
        (tmp_path / "ci.pub").chmod(0o600)
        keys.read_secret(tmp_path / "ci.pub")


def test_trusted_keys_are_listed_in_a_file_of_ones_own(tmp_path: Path, secret: keys.SecretKey) -> None:
    path = tmp_path / "config" / "trusted_keys"
    assert keys.add_trusted(path, secret.public) and not keys.add_trusted(path, secret.public)
    path.write_text(f"# the build machine\n{path.read_text()}\n")
    assert keys.read_trusted(path) == (secret.public,)
    path.chmod(0o666)
    with pytest.raises(UntrustedArtifact, match="can be written by another user"):
        keys.read_trusted(path)
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        keys.read_trusted(tmp_path / "none")
