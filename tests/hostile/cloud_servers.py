"""Servers that keep objects in memory and speak what Google's and Azure's object stores speak, as far as a store asks.

They hold each request to its signature as the real ones do: Google's bearer is a token that an account's key signed,
Azure's is an HMAC over the request. Listings come in pages of three.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

PAGE = 3
ACCOUNT, CONTAINER = "account", "artifacts"
ACCOUNT_KEY = base64.b64encode(b"the key of an account").decode()


@dataclass
class Cloud:
    """What a server holds and was asked; `variables` are what a client's environment names it by."""

    address: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


class _Objects(BaseHTTPRequestHandler):
    """One container of objects by their names; what differs between the two is below."""

    protocol_version = "HTTP/1.1"
    cloud: Cloud

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        name, asked = self.name_of(parts.path), dict(parse_qsl(parts.query))
        if not self.admit(b"", asked):
            return
        if not name:
            self.list(asked)
        elif name in self.cloud.objects:
            self.answer(200, self.cloud.objects[name], "application/octet-stream")
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>", "application/xml")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.admit(body, {}):
            self.cloud.objects[self.name_of(urlsplit(self.path).path)] = body
            self.answer(201, b"", "text/plain")

    def name_of(self, path: str) -> str:
        container, _, name = unquote(path).lstrip("/").partition("/")
        assert container == CONTAINER, path
        return name

    def admit(self, body: bytes, asked: dict[str, str]) -> bool:
        self.cloud.requests.append(f"{self.command} {unquote(self.path)}")
        if self.is_signed(asked):
            return True
        self.answer(403, b"<Error><Code>AuthenticationFailed</Code></Error>", "application/xml")
        return False

    def page(self, prefix: str, after: str) -> tuple[list[str], str]:
        names = [name for name in sorted(self.cloud.objects) if name.startswith(prefix) and name > after]
        return names[:PAGE], names[PAGE - 1] if len(names) > PAGE else ""

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind, "Content-Length": str(len(body)), "Last-Modified": formatdate(usegmt=True),
            "ETag": f'"{hashlib.md5(body).hexdigest()}"', "x-ms-blob-type": "BlockBlob", "x-goog-generation": "1",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def is_signed(self, asked: dict[str, str]) -> bool:
        raise NotImplementedError

    def list(self, asked: dict[str, str]) -> None:
        raise NotImplementedError


class _Google(_Objects):
    public: rsa.RSAPublicKey

    def is_signed(self, asked: dict[str, str]) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        signed, _, signature = token.rpartition(".")
        try:
            self.public.verify(_decode(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        except (InvalidSignature, ValueError):
            return False
        return json.loads(_decode(signed.partition(".")[2]))["iss"] == "builder@example.com"  # type: ignore[no-any-return]

    def list(self, asked: dict[str, str]) -> None:
        assert asked["list-type"] == "2"
        names, after = self.page(asked.get("prefix", ""), asked.get("continuation-token", ""))
        each = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>e</ETag><Size>{len(self.cloud.objects[name])}</Size></Contents>"
            for name in names
        )
        more = f"<NextContinuationToken>{escape(after)}</NextContinuationToken>" if after else ""
        self.answer(200, f"<ListBucketResult>{each}{more}</ListBucketResult>".encode(), "application/xml")


class _Azure(_Objects):
    def is_signed(self, asked: dict[str, str]) -> bool:
        """Compare the HMAC of the request as Azure's `Authorize with Shared Key` says it is made."""
        headers = self.headers
        length = headers.get("Content-Length", "")
        plain = ["Content-Encoding", "Content-Language", "", "Content-MD5", "Content-Type", "Date"]
        plain += ["If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"]
        lines = [self.command, *(headers.get(name, "") if name else "" if length == "0" else length for name in plain)]
        lines += [f"{name.lower()}:{headers[name]}" for name in sorted(headers) if name.lower().startswith("x-ms-")]
        path = urlsplit(self.path).path
        text = "\n".join([*lines, f"/{ACCOUNT}{path}", *(f"{name}:{asked[name]}" for name in sorted(asked))])
        digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), "sha256")
        return headers.get("Authorization") == f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"

    def list(self, asked: dict[str, str]) -> None:
        assert asked["restype"] == "container" and asked["comp"] == "list"
        names, after = self.page(asked.get("prefix", ""), asked.get("marker", ""))
        each = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(usegmt=True)}</Last-Modified>"
            f"<Content-Length>{len(self.cloud.objects[name])}</Content-Length><Content-Type>x</Content-Type>"
            f"<Etag>e</Etag><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in names
        )
        body = f"<EnumerationResults><Blobs>{each}</Blobs><NextMarker>{escape(after)}</NextMarker></EnumerationResults>"
        self.answer(200, body.encode(), "application/xml")


@contextmanager
def google_server(folder: Path) -> Iterator[Cloud]:
    """Serve what Google's object store serves; the service account's key is written into `folder`."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    with _served(type("Bound", (_Google,), {"public": key.public_key()})) as cloud:
        account = {
            "type": "service_account", "client_email": "builder@example.com", "private_key_id": "one",
            "private_key": key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ).decode(),
            "gcs_base_url": cloud.address,
        }  # fmt: skip
        (folder / "account.json").write_text(json.dumps(account))
        cloud.variables = {"GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json")}
        yield cloud


@contextmanager
def azure_server() -> Iterator[Cloud]:
    """Serve what Azure's object store serves."""
    with _served(type("Bound", (_Azure,), {})) as cloud:
        cloud.variables = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            "AZURE_STORAGE_ENDPOINT": cloud.address,
        }  # fmt: skip
        yield cloud


@contextmanager
def _served(kind: type[_Objects]) -> Iterator[Cloud]:
    cloud = kind.cloud = Cloud()
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    cloud.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
