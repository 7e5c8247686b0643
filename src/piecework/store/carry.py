"""A store's entries carried to a remote and from there: blobs first, records last, then the index of what is there."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

from piecework.errors import ArtifactMissing, OptionError, StoreError
from piecework.store.disk import DiskStore
from piecework.store.envelope import RECORD_WORD, seal
from piecework.store.inventory import Name, close_over, list_stored
from piecework.store.layout import RECORD_SUFFIX, RECORDS, blob_parts, record_parts, signature_parts
from piecework.store.link import Link
from piecework.store.references import artifacts_of, blobs_of, is_name
from piecework.store.remote import INDEX, INDEX_WORD, RemoteStore

PATIENCE_S = 300.0  # whoever pulls or pushes wants just that, and waits for it


def push(store: DiskStore, link: Link, keep: Iterable[Name] | None = None) -> list[Name]:
    """Write records (all, or those of `keep`), what they refer to and their signatures to a remote, then its index.

    Blobs that are there already are not sent again. Raises StoreError where the remote does not take them.
    """
    if link.is_read_only:
        raise OptionError(f"`{link.url}` takes no writes", hint="push to s3://, gs://, az:// or file://")
    stored = {record.name: record for record in list_stored(store)}
    chosen = list(stored if keep is None else keep)
    names = sorted(close_over(stored, chosen))
    digests = sorted({digest for name in names for digest in stored[name].blobs})
    there = _listed(link)

    def objects() -> Iterator[tuple[str, bytes]]:
        for digest in digests:
            path = "/".join(blob_parts(digest))
            if path not in there:
                yield path, store.entries.read_blob(blob_parts(digest), digest, is_own=True, quiet=True)
        for kind, key in names:
            signatures = store.entries.read_signatures(kind, key)
            if signatures is not None:
                yield "/".join(signature_parts(kind, key)), signatures
            body, _ = store.entries.read_body(record_parts(kind, key), kind, key, quiet=True)
            yield "/".join(record_parts(kind, key)), seal(RECORD_WORD, body)

    link.put(objects())
    link.put([(INDEX, make_index({*names, *names_of(_listed(link))}))])  # and what others pushed meanwhile
    return names


def _listed(link: Link) -> set[str]:
    found = link.list("")
    if link.is_resting:  # an index without what is there would hide it
        raise StoreError(f"`{link.url}` cannot be listed", hint="the warning above says why; try again later")
    return set(found or ())


def pull(store: RemoteStore, keep: Collection[str] | None = None) -> list[Name]:
    """Bring records (all, or those whose keys are in `keep`) and what they refer to into the store's folder.

    Raises ArtifactMissing where there are none, StoreError where only part of them came.
    """
    listed = store.link.list("")
    names = sorted(names_of(listed)) if listed is not None else store.read_index()
    wanted = [name for name in names if is_name(*name)]
    wanted = [name for name in wanted if keep is None or name[1] in keep]
    if not wanted:
        if store.link.is_resting:
            raise StoreError(f"`{store.link.url}` does not answer", hint="the warning above says why; try again later")
        what = "no records" if keep is None else f"none of {', '.join(f'`{key}`' for key in sorted(keep))}"
        raise ArtifactMissing(f"`{store.link.url}` holds {what}", hint="`piecework store push URL` fills it")
    brought: set[Name] = set()
    try:
        for name in wanted:
            _bring(store, name, brought)
    except ArtifactMissing as error:
        raise StoreError(
            f"`{store.link.url}` gave only part of what was asked for: {error.message}; what came is kept",
            hint=f"pull again, or with more patience: `{store.link.url}?patience_s=60`",
        ) from error
    return sorted(brought)


def _bring(store: RemoteStore, name: Name, brought: set[Name]) -> None:
    if name in brought:
        return
    record = store.read_record(*name)
    for digest in blobs_of(name[0], record):
        store.read_blob(digest)
    brought.add(name)
    for other in artifacts_of(record):
        _bring(store, other, brought)


def make_index(names: Iterable[Name]) -> bytes:
    """Return the index of a remote that holds records of these names."""
    return seal(INDEX_WORD, json.dumps(sorted(map(list, names)), separators=(",", ":")).encode())


def names_of(paths: Iterable[str]) -> set[Name]:
    """Return the records among the paths of a remote's objects."""
    found = set()
    for path in paths:
        parts = tuple(path.split("/"))
        if len(parts) == 4 and parts[0] == RECORDS and parts[3].endswith(RECORD_SUFFIX):
            found.add((parts[1], parts[3].removesuffix(RECORD_SUFFIX)))
    return {name for name in found if is_name(*name)}
