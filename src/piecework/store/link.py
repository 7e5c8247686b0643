"""The way to a remote store: `obstore` behind a bound on waiting, so that a slow or dead remote costs a stated second.

Everything goes through one loop in a daemon thread, which nobody waits for when the process ends. What this process
has waited for in all is counted; where that reaches `patience_s`, or a request fails, the remote is left alone for a
minute: what is missing is made here instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from piecework.errors import OptionError, StoreError
from piecework.events import Observer, StoreWarning, ignore

try:
    from obstore.exceptions import BaseError, NotFoundError, NotSupportedError
    from obstore.store import from_url
except ImportError as error:
    missing = "a remote store needs `obstore`, which is not installed"
    raise StoreError(missing, hint="`pip install piecework[remote]`") from error

PATIENCE_S = 1.0
REST_S = 60.0
UPLOAD_S = 60.0
AT_ONCE = 16
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")
READ_ONLY = ("http", "https")
# `obstore` raises Python's own error where there is one of the meaning.
ABSENT = (NotFoundError, FileNotFoundError)
NO_LISTING = (NotSupportedError, NotImplementedError)
FAILURES = (BaseError, OSError, OutOfTime, ValueError)
Result = TypeVar("Result")


class Closed(Exception):
    """The remote is left alone for now. Never leaves the store."""


class Link:
    """Objects of a remote by their paths; what is absent, and all that is asked while the remote rests, is None."""

    def __init__(self, url: str, *, observer: Observer = ignore, patience_s: float = PATIENCE_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise OptionError(f"`{url}` names no store", hint=f"known are {', '.join(f'{s}://' for s in SCHEMES)}")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self.patience_s = _patience(parts.query, patience_s, url)
        self.is_read_only = parts.scheme in READ_ONLY
        self.observer = observer
        self.waited_s = 0.0
        self._resting_until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._queue: list[tuple[str, bytes]] = []
        self._uploading = self._has_failed = False
        self._store = _open(self.url)

    def fetch(self, paths: Iterable[str], limit: int) -> dict[str, bytes | None]:
        """Return the objects at `paths`, read side by side; None for one that is absent or longer than `limit`."""
        wanted = list(dict.fromkeys(paths))

        async def fetch_all() -> dict[str, bytes | None]:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(path: str) -> bytes | None:
                async with gate:
                    return await self._get(path, limit)

            return dict(zip(wanted, await asyncio.gather(*map(one, wanted)), strict=True))

        try:
            return self._wait(fetch_all())
        except Closed:
            return dict.fromkeys(wanted)

    def list(self, folder: str) -> list[str] | None:
        """Return the paths of all objects below a folder; None where the remote cannot say, or rests."""

        async def collect() -> list[str] | None:
            try:
                found = await self._store.list(folder or None).collect_async()
            except NO_LISTING:
                return None
            return [str(each["path"]) for each in found]

        if self.is_read_only:  # plain HTTP has no listing
            return None
        try:
            return self._wait(collect())
        except Closed:
            return None

    def put_later(self, path: str, data: bytes) -> None:
        """Write an object in the background, after those that were given before; a failure is told once."""
        with self._lock:
            if self._has_failed:
                return
            self._queue.append((path, data))
            if not self._uploading:
                self._uploading = True
                asyncio.run_coroutine_threadsafe(self._upload(), self._running())

    def put(self, objects: Iterable[tuple[str, bytes]]) -> None:
        """Write objects one after another and wait for them; raise StoreError where one cannot be written."""
        for path, data in objects:
            future = asyncio.run_coroutine_threadsafe(self._store.put_async(path, data), self._running())
            try:
                future.result(UPLOAD_S)
            except FAILURES as error:
                future.cancel()
                raise StoreError(
                    f"`{self.url}/{path}` cannot be written: {_reason(error)}",
                    hint="see that the bucket exists, and that the credentials in the environment may write to it",
                ) from error

    def flush(self, timeout_s: float) -> int:
        """Wait until what was given to `put_later` is written, for so long at most; return how many objects are not."""
        deadline = time.monotonic() + timeout_s
        while self._uploading and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(self._queue)

    @property
    def is_resting(self) -> bool:
        """Tell whether the remote is left alone for now."""
        return time.monotonic() < self._resting_until

    async def _get(self, path: str, limit: int) -> bytes | None:
        try:
            found = await self._store.get_async(path)
            return bytes(await found.bytes_async()) if found.meta["size"] <= limit else None
        except ABSENT:
            return None

    async def _upload(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._uploading = False
                    return
                path, data = self._queue[0]
            try:
                await asyncio.wait_for(self._store.put_async(path, data), UPLOAD_S)
            except FAILURES as error:
                with self._lock:  # a record must not arrive without the blobs before it
                    self._has_failed, self._uploading = True, False
                self._tell(f"what is made here is not written to it ({_reason(error)})")
                return
            with self._lock:
                self._queue.pop(0)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        now = time.monotonic()
        if now >= self._resting_until > 0:  # it has rested: another try, with all patience
            self._resting_until, self.waited_s = 0.0, 0.0
        if self.is_resting:
            work.close()
            raise Closed
        future = asyncio.run_coroutine_threadsafe(work, self._running())
        try:
            return future.result(max(0.0, self.patience_s - self.waited_s))
        except FAILURES as error:
            future.cancel()
            self._resting_until = time.monotonic() + REST_S
            slow = f"it was waited for {self.patience_s:g} s in all"
            self._tell(f"{slow if isinstance(error, OutOfTime) else _reason(error)}; what is missing is made here")
            raise Closed from None
        finally:
            self.waited_s += time.monotonic() - now

    def _tell(self, reason: str) -> None:
        self.observer(StoreWarning(path=self.url, reason=reason))

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="piecework-remote", daemon=True).start()
        return self._loop


def _open(url: str) -> Any:
    """Open a store; credentials and endpoints are those that the environment names to `obstore`."""
    # Plain HTTP where the URL or the endpoint in the environment says so: each byte is verified, whatever brings it.
    client: Any = {"connect_timeout": "10s", "timeout": f"{UPLOAD_S:g}s", "allow_http": True}
    retry: Any = {"max_retries": 0, "retry_timeout": timedelta(0)}
    try:
        if url.startswith("file:"):
            return from_url(url, mkdir=True)
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        raise OptionError(
            f"remote store `{url}` cannot be opened: {_reason(error)}",
            hint="credentials, region and endpoint come from the environment, as `AWS_ENDPOINT_URL` for S3",
        ) from error


def _patience(query: str, usual: float, url: str) -> float:
    given = parse_qs(query, keep_blank_values=True)
    with suppress(ValueError):
        patience = float(given.pop("patience_s", [str(usual)])[0])
        if not given and 0 < patience < float("inf"):
            return patience
    raise OptionError(f"`{url}` ends with `?{query}`", hint="the one thing that may be said there is `?patience_s=5`")


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0].strip()
    return text[:200] if text else type(error).__name__
