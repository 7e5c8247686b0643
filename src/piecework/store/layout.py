"""Where each entry lies below the store's folder, and which names may become part of a path.

    FORMAT                                 the marker: which format the folder has
    blobs/<2 digits>/<sha256>              bytes as they are
    records/<kind>/<2 letters>/<key>.record
    records/<kind>/<2 letters>/<key>/      texts for people beside a record; never read back
    signatures/<kind>/<2 letters>/<key>.sig
    uses/<kind>/<2 letters>/<key>.use      last use, where uses are recorded
    flights/<sha256 of the name>.lock      one for each piece of work that is done once a host
    staging/                               files being written; never read
    quarantine/                            damaged entries, moved here as they were
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from piecework.errors import OptionError, StoreError
from piecework.values.digest import digest_text

Parts = tuple[str, ...]

FORMAT = 1
MARKER: Parts = ("FORMAT",)
BLOBS, RECORDS, SIGNATURES, USES = "blobs", "records", "signatures", "uses"
FLIGHTS, STAGING, QUARANTINE = "flights", "staging", "quarantine"
RECORD_SUFFIX, SIGNATURE_SUFFIX, USE_SUFFIX = ".record", ".sig", ".use"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGESTS_IN_TEXT = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_STRINGS_IN_TEXT = re.compile(r'"([A-Za-z0-9._-]{1,200})"')


def is_kind(name: str) -> bool:
    """Tell whether a folder's name is that of a kind of records; other programs leave folders of their own."""
    return _KIND.fullmatch(name) is not None


def is_key(name: str) -> bool:
    """Tell whether a name can be a record's key."""
    return _KEY.fullmatch(name) is not None


def is_digest(text: str) -> bool:
    """Tell whether `text` is a SHA-256 in lower-case hex."""
    return _DIGEST.fullmatch(text) is not None


def blob_parts(digest: str, error: type[StoreError] = StoreError) -> Parts:
    """Return the path of a blob below the store's folder; raises `error` if `digest` is not one."""
    if not is_digest(digest):
        raise error(f"`{digest}` is not a SHA-256 in hex", hint="blobs are named by the digest of their bytes")
    return (BLOBS, digest[:2], digest)


def record_parts(kind: str, key: str, error: type[StoreError] = StoreError) -> Parts:
    """Return the path of a record below the store's folder; raises `error` for a name that cannot stand in a path."""
    return _entry(RECORDS, kind, key, RECORD_SUFFIX, error)


def note_parts(kind: str, key: str) -> Parts:
    """Return the folder of the texts for people that lie beside a record."""
    parts = record_parts(kind, key)
    return (*parts[:-1], parts[-1].removesuffix(RECORD_SUFFIX))


def signature_parts(kind: str, key: str) -> Parts:
    """Return the path of a record's signatures below the store's folder."""
    return _entry(SIGNATURES, kind, key, SIGNATURE_SUFFIX, StoreError)


def use_parts(kind: str, key: str) -> Parts:
    """Return the path of the note of a record's last use below the store's folder."""
    return _entry(USES, kind, key, USE_SUFFIX, StoreError)


def flight_name(name: str) -> str:
    """Return the file name that stands for a piece of work; any text may name one."""
    return digest_text(name)


def kind_parts(kind: str) -> Parts:
    """Return the folder that holds the records of one kind."""
    check_kind(kind, StoreError)
    return (RECORDS, kind)


def fan_out(key: str) -> str:
    """Return the folder name that spreads keys; all the keys of one group of at least two letters share it."""
    return key[:2].ljust(2, "_")


def check_kind(kind: str, error: type[StoreError]) -> None:
    """Raise `error` if `kind` may not become part of a path."""
    if not is_kind(kind):
        raise error(f"`{kind}` is no kind of record", hint="kinds are lower-case words, such as `program`")


def _entry(top: str, kind: str, key: str, suffix: str, error: type[StoreError]) -> Parts:
    check_kind(kind, error)
    if not is_key(key):
        raise error(
            f"`{key}` is no key of a record",
            hint="keys are up to 200 letters, digits, dots, dashes and underscores; `piecework store ls` lists them",
        )
    return (top, kind, fan_out(key), key + suffix)


def digests_in(text: str) -> frozenset[str]:
    """Return every SHA-256 that stands anywhere in a record's text.

    Whatever looks like a digest counts as a reference: the collector then needs to know no record's schema, and
    errs on the side of keeping.
    """
    return frozenset(_DIGESTS_IN_TEXT.findall(text))


def names_in(text: str) -> frozenset[str]:
    """Return every string in a record's text that could be the key of another record."""
    return frozenset(_STRINGS_IN_TEXT.findall(text)) | digests_in(text)


def store_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a store's folder; raises OptionError for what no path may hold."""
    if "\0" in os.fsdecode(path):
        raise OptionError("a store's path has a zero byte in it", hint="give a folder: `--store DIR`")
    return Path(os.path.abspath(path))


def is_remote(place: str) -> bool:
    """Tell whether a store is named by a URL, and not by a folder."""
    return "://" in place


def remote_folder(url: str, default: Path) -> Path:
    """Return the folder that stands before a remote, beside the default store's."""
    return default.parent / "remote" / digest_text(url.partition("?")[0].rstrip("/"))[:16]


def default_folder(xdg_cache_home: str, home: str, platform: str = sys.platform) -> Path:
    """Return the store's folder under the platform's cache folder; relative variables are ignored, as XDG asks."""
    if os.path.isabs(xdg_cache_home):
        return Path(xdg_cache_home, "piecework", "store")
    if not os.path.isabs(home):
        raise OptionError(
            "no folder for the store: neither `XDG_CACHE_HOME` nor `HOME` is an absolute path",
            hint="say where with `--store DIR` or `PIECEWORK_STORE=DIR`, or keep nothing with `--store memory`",
        )
    cache = Path(home, "Library", "Caches") if platform == "darwin" else Path(home, ".cache")
    return cache / "piecework" / "store"
