"""Signatures over records, in an envelope after DSSE (github.com/secure-systems-lab/dsse).

What is signed is a *statement*: the record's kind, key and digest, the digests of the blobs that it refers to, its
toolchain, and the policy under which the signer wants it loaded. A record that is copied under another key, changed, or
signed for another policy has no statement of its own, and is refused before its content is read.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piecework.errors import ArtifactMissing, StoreError, UntrustedArtifact
from piecework.store.disk import DiskStore
from piecework.store.files import publish
from piecework.store.inventory import list_names
from piecework.store.keys import PublicKey, SecretKey
from piecework.store.layout import digests_in, record_parts, signature_parts
from piecework.store.trust import SIGNED
from piecework.values.digest import canonical_json, digest_bytes, digest_data

PAYLOAD_TYPE = "application/vnd.piecework.record.v1+json"
DEFAULT_POLICY = "default"


@dataclass(frozen=True)
class SignedRecords:
    """Believe records that one of `keys` signed for `policy`, and the blobs that they refer to, wherever they lie."""

    keys: tuple[PublicKey, ...]
    policy: str = DEFAULT_POLICY
    name: str = field(default=SIGNED, init=False)
    needs_signature: bool = field(default=True, init=False)

    def check_folder(self, root: Path) -> None:
        """Accept any folder: what counts is who signed."""

    def check_file(self, path: Path, status: object) -> None:
        """Accept any plain file: what counts is who signed."""

    def check_record(self, kind: str, key: str, body: bytes, signatures: bytes | None) -> frozenset[str]:
        """Check the signatures over one record; return the digests that the signer vouched for."""
        statement = _open_envelope(kind, key, signatures, self.keys)
        for name, expected, reason in (
            ("kind", kind, "its signature was made for a `{found}` record"),
            ("key", key, "its signature was made for the record `{found}`"),
            ("record", digest_bytes(body), "it changed after it was signed"),
            ("policy", self.policy, "it was signed for the policy `{found}`, not for `{expected}`"),
        ):
            if statement.get(name) != expected:
                raise _refuse(kind, key, reason.format(found=statement.get(name), expected=expected))
        if statement != make_statement(kind, key, body, self.policy):
            raise _refuse(kind, key, "its blobs or its toolchain are not those that were signed")
        return frozenset(statement["blobs"])


def make_statement(kind: str, key: str, body: bytes, policy: str) -> dict[str, Any]:
    """Return what is signed for a record whose body is `body`; the body was verified, and is read as text alone."""
    return {
        "kind": kind,
        "key": key,
        "record": digest_bytes(body),
        "blobs": sorted(digests_in(body.decode("ascii", "replace"))),
        "toolchain": _toolchain_digest(body),
        "policy": policy,
    }


def _toolchain_digest(body: bytes) -> str:
    """Return the digest of the record's `toolchain`, of null where it has none."""
    try:
        content = json.loads(body)
        payload = content.get("payload") if isinstance(content, dict) else None
        return digest_data(payload.get("toolchain") if isinstance(payload, dict) else None)
    except (ValueError, RecursionError):  # a number that JSON does not have is a ValueError too
        return ""


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that DSSE signs: type and payload with their lengths, so that no two pairs give the same."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sign_body(
    kind: str, key: str, body: bytes, secret: SecretKey, policy: str = DEFAULT_POLICY, existing: bytes | None = None
) -> bytes:
    """Return the envelope with a signature over a record; signatures by other keys over the same statement stay."""
    payload = canonical_json(make_statement(kind, key, body, policy)).encode()
    signature = secret.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    mine = {"keyid": secret.public.id, "sig": base64.b64encode(signature).decode()}
    others = _signatures_over(payload, existing, but=secret.public.id)
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": sorted([*others, mine], key=lambda each: each["keyid"]),
    }
    return canonical_json(envelope).encode()


def _signatures_over(payload: bytes, existing: bytes | None, but: str) -> list[dict[str, str]]:
    if existing is None:
        return []
    try:
        found, signatures = _parse_envelope(existing)
    except ValueError:
        return []
    if found != payload:
        return []
    return [{"keyid": name, "sig": base64.b64encode(sig).decode()} for name, sig in signatures if name != but]


def _parse_envelope(data: bytes) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Return the payload and the signatures of an envelope; ValueError if it is none."""
    try:
        envelope = json.loads(data)
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError("another type of payload")
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [(str(s["keyid"]), base64.b64decode(s["sig"], validate=True)) for s in envelope["signatures"]]
    except (KeyError, TypeError, AttributeError, binascii.Error, RecursionError) as error:
        raise ValueError("not an envelope") from error
    return payload, signatures


def _open_envelope(kind: str, key: str, data: bytes | None, keys: Iterable[PublicKey]) -> Mapping[str, Any]:
    """Return the statement in an envelope, once a trusted key's signature over it was found right."""
    if data is None:
        raise _refuse(kind, key, "it is not signed")
    try:
        payload, signatures = _parse_envelope(data)
    except ValueError:
        raise _refuse(kind, key, "its signature file is damaged") from None
    message, trusted = pre_authentication_encoding(PAYLOAD_TYPE, payload), {each.id: each for each in keys}
    # Each trusted key is tried once, however many signatures are listed.
    known = {name: signature for name, signature in signatures if name in trusted}
    if not known:
        names = ", ".join(f"`{name}`" for name, _ in signatures[:5]) or "nobody"
        raise _refuse(kind, key, f"it is signed by {names}, and not by a trusted key")
    if not any(trusted[name].is_right(signature, message) for name, signature in known.items()):
        raise _refuse(kind, key, "its signature is wrong")
    statement = json.loads(payload)
    return statement if isinstance(statement, dict) else {}


def _refuse(kind: str, key: str, reason: str) -> UntrustedArtifact:
    return UntrustedArtifact(
        f"{kind} record `{key}` is not loaded: {reason}",
        hint="`piecework store sign --key FILE.key` signs it; `piecework store trust FILE.pub` lists the signer's key",
        facts={"kind": kind, "key": key, "reason": reason, "policy": SIGNED},
    )


def sign_records(store: DiskStore, secret: SecretKey, policy: str = DEFAULT_POLICY) -> list[tuple[str, str]]:
    """Sign every record that the store's own policy lets be read and that is whole; return what was signed."""
    store.check_writable()
    signed = []
    for kind, key in list_names(store):
        try:
            store.entries.read_record(record_parts(kind, key), kind, key, quiet=True)  # of its own content, too
            body, _ = store.entries.read_body(record_parts(kind, key), kind, key, quiet=True)
        except ArtifactMissing:  # damaged, which was told, or gone
            continue
        for digest in sorted(digests_in(body.decode("ascii", "replace"))):
            store.has_blob(digest)  # a damaged one is told and moved away: what is signed must not be rotten
        existing = store.entries.read_signatures(kind, key)
        publish(store.path, signature_parts(kind, key), sign_body(kind, key, body, secret, policy, existing))
        signed.append((kind, key))
    return signed


def verify_records(store: DiskStore, trust: SignedRecords) -> dict[tuple[str, str], str]:
    """Check every record's signatures; return each record with what is wrong, the empty text where nothing is."""
    found = {}
    for kind, key in list_names(store):
        try:
            body, _ = store.entries.read_body(record_parts(kind, key), kind, key, quiet=True)
            trust.check_record(kind, key, body, store.entries.read_signatures(kind, key))
            found[kind, key] = ""
        except StoreError as error:
            found[kind, key] = str(error.facts.get("reason", error.message))
    return found
