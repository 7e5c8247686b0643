"""Servers that a remote store may meet: one that speaks S3, one that serves files, and those that misbehave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def free_port() -> int:
    """Return a port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a real S3-speaking server in a process of its own; yield its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/moto-api/data.json", timeout=5).read()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, "the S3 server ended"
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """Serve a folder's files by plain HTTP, as any web server does; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Endless(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        names = "".join(
            f"<Contents><Key>records/program/aa/a{number}.record</Key><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified><ETag>e</ETag><Size>1</Size></Contents>"
            for number in range(50)
        )
        more = f"<NextContinuationToken>{self.server.asked}</NextContinuationToken>"  # type: ignore[attr-defined]
        body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{names}{more}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def endless_server() -> Iterator[str]:
    """Speak S3, and list objects without end; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    server.asked = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def rude_server(answer: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """Accept connections and send `answer`, then break off; None: never answer. Yield the address and the requests."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    requests: list[bytes] = []
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            requests.append(connection.recv(4096))
            if answer is not None:
                connection.sendall(answer)
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in held:
            connection.close()
        thread.join()
