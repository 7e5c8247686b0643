"""The way to a remote store: `obstore` behind a bound on waiting, so that a slow or dead remote costs a stated second.

What is asked goes through threads that nobody waits for when it takes long. What this process has waited for in all is
counted; where that reaches `patience_s`, or a request fails, the remote is left alone for a minute: what is missing is
made here instead.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from concurrent.futures import TimeoutError as OutOfTime
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from piecework.errors import OptionError, StoreError
from piecework.events import Observer, StoreWarning, ignore
from piecework.store.crew import Crew

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
MOST_LISTED = 1_000_000
SETTLE_S = 1.0  # what requests are given at the end of the process, and to end by themselves once nobody waits
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")
READ_ONLY = ("http", "https")
NAMED_BY = {
    "s3": "`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`",
    "gs": "`GOOGLE_SERVICE_ACCOUNT` or `GOOGLE_APPLICATION_CREDENTIALS`, a file each",
    "a": "`AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_ENDPOINT`",
}
# `obstore` raises Python's own error where there is one of the meaning.
ABSENT = (NotFoundError, FileNotFoundError)
NO_LISTING = (NotSupportedError, NotImplementedError)
FAILURES = (BaseError, OSError, OutOfTime, ValueError)
_USER, _ASKED = re.compile(r"(?<=//)[^/\s@:]*:[^/\s@]*@"), re.compile(r"(?<=[^\s?])\?[^\s`]*=[^\s`]*")


class Closed(Exception):
    """The remote is left alone for now. Never leaves the store."""


class Link:
    """Objects of a remote by their paths; what is absent, and all that is asked while the remote rests, is None."""

    def __init__(self, url: str, *, observer: Observer = ignore, patience_s: float = PATIENCE_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise OptionError(f"`{without_secrets(url)}` names no store", hint=f"known are {known}")
        place = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self.url = without_secrets(place)  # as it is shown
        self.patience_s = _patience(parts.query, patience_s, url)
        self.is_read_only = parts.scheme in READ_ONLY
        self.observer = observer
        self.waited_s = 0.0
        self._resting_until = 0.0
        self._lock = threading.Lock()
        self._queue: list[tuple[str, bytes]] = []
        self._uploading = self._has_failed = False
        self._credentials = _credentials(place)
        self._crew = Crew(AT_ONCE, SETTLE_S)
        self._reading = _open(place, min(self.patience_s + SETTLE_S / 2, UPLOAD_S))
        self._writing = self._reading if self.is_read_only else _open(place, UPLOAD_S)

    def fetch(self, paths: Iterable[str], limit: int) -> dict[str, bytes | None]:
        """Return the objects at `paths`, read side by side; None for one that is absent or longer than `limit`."""
        wanted = list(dict.fromkeys(paths))
        try:
            found = self._wait([partial(self._get, path, limit) for path in wanted])
        except Closed:
            return dict.fromkeys(wanted)
        return dict(zip(wanted, found, strict=True))

    def list(self, folder: str) -> Sequence[str] | None:
        """Return the paths of all objects below a folder; None where the remote cannot say, or rests."""
        if self.is_read_only:  # plain HTTP has no listing
            return None
        try:
            found: Sequence[str] | None = self._wait([partial(self._list, folder)])[0]
        except Closed:
            return None
        return found

    def put_later(self, path: str, data: bytes) -> None:
        """Write an object in the background, after those that were given before; a failure is told once."""
        with self._lock:
            if self._has_failed:
                return
            self._queue.append((path, data))
            if not self._uploading:
                self._uploading = True
                self._crew.submit(self._upload)

    def put(self, objects: Iterable[tuple[str, bytes]]) -> None:
        """Write objects one after another and wait for them; raise StoreError where one cannot be written."""
        for path, data in objects:
            try:
                self._crew.submit(partial(self._writing.put, path, data)).result(UPLOAD_S)
            except FAILURES as error:
                raise StoreError(
                    f"`{self.url}/{path}` cannot be written: {_reason(error)}",
                    hint=f"see that the bucket is there and may be written to; {self._credentials}",
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

    def _get(self, path: str, limit: int) -> bytes | None:
        try:
            found = self._reading.get(path)
            return bytes(found.bytes()) if found.meta["size"] <= limit else None
        except ABSENT:
            return None

    def _list(self, folder: str) -> Sequence[str] | None:
        try:
            found: list[str] = []
            for page in self._reading.list(folder or None):
                found += (str(each["path"]) for each in page)
                if self.is_resting or len(found) > MOST_LISTED:  # nobody waits any more, or it never ends
                    raise OutOfTime(f"its list holds more than {len(found)} objects")
            return found
        except NO_LISTING:
            return None

    def _upload(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._uploading = False
                    return
                path, data = self._queue[0]
            try:
                self._writing.put(path, data)
            except FAILURES as error:
                with self._lock:  # a record must not arrive without the blobs before it
                    self._has_failed, self._uploading = True, False
                self._tell(f"what is made here is not written to it ({_reason(error)})")
                return
            with self._lock:
                self._queue.pop(0)

    def _wait(self, calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        """Return what calls made side by side gave; Closed where the remote rests, one fails, or patience ends."""
        now = time.monotonic()
        if now >= self._resting_until > 0:  # it has rested: another try, with all patience
            self._resting_until, self.waited_s = 0.0, 0.0
        if self.is_resting:
            raise Closed
        asked = [self._crew.submit(call) for call in calls]
        try:
            done, late = wait(asked, max(0.0, self.patience_s - self.waited_s), FIRST_EXCEPTION)
            failed = next((error for each in done if (error := each.exception()) is not None), None)
            if failed is None and not late:
                return [each.result() for each in asked]
            if failed is not None and not isinstance(failed, FAILURES):
                raise failed
            slow = f"it was waited for {self.patience_s:g} s in all"
            self._resting_until = time.monotonic() + REST_S
            self._tell(f"{slow if failed is None else _reason(failed)}; what is missing is made here")
            raise Closed
        finally:
            for each in asked:
                each.cancel()
            self.waited_s += time.monotonic() - now

    def _tell(self, reason: str) -> None:
        self.observer(StoreWarning(path=self.url, reason=reason))


def _open(url: str, timeout_s: float) -> Any:
    """Open a store; credentials and endpoints are those that the environment names to `obstore`."""
    # Plain HTTP where the URL or the endpoint in the environment says so: each byte is verified, whatever brings it.
    client: Any = {"connect_timeout": "10s", "timeout": f"{timeout_s:g}s", "allow_http": True}
    retry: Any = {"max_retries": 0, "retry_timeout": timedelta(0)}
    try:
        if url.startswith("file:"):
            return from_url(url, mkdir=True)
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        raise OptionError(
            f"remote store `{without_secrets(url)}` cannot be opened: {_reason(error)}",
            hint=_credentials(url),
        ) from error


def _credentials(url: str) -> str:
    named = next((names for scheme, names in NAMED_BY.items() if url.startswith(scheme)), "what `obstore` reads")
    return f"credentials and endpoint come from the environment: {named}"


def _patience(query: str, usual: float, url: str) -> float:
    given = parse_qs(query, keep_blank_values=True)
    with suppress(ValueError):
        patience = float(given.pop("patience_s", [str(usual)])[0])
        if not given and 0 < patience < float("inf"):
            return patience
    named = ", ".join(f"`{name}`" for name in parse_qs(query, keep_blank_values=True)) or "nothing that is known"
    raise OptionError(
        f"`{without_secrets(url)}` is followed by {named}",
        hint="the one thing that may be said behind `?` is `?patience_s=5`; credentials come from the environment",
    )


def without_secrets(text: str) -> str:
    """Return a text without what may be secret in its addresses: user, password, and whatever is asked with."""
    return _ASKED.sub("", _USER.sub("", text))


def _reason(error: BaseException) -> str:
    text = without_secrets(str(error).partition("\n")[0].strip())
    return text[:400] if text else type(error).__name__
