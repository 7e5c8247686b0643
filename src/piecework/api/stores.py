"""The store that a caller gets without naming one, and what is logged without an observer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from piecework.env import Environment
from piecework.errors import OptionError
from piecework.events import (
    ArtifactCompiled,
    ArtifactReused,
    CutInside,
    FallBack,
    Observer,
    PassDone,
    Phase,
    RecordMiss,
    SplitDone,
    StoreWarning,
)
from piecework.store.disk import DiskStore
from piecework.store.layout import default_folder, is_remote, remote_folder
from piecework.store.memory import MemoryStore
from piecework.store.protocol import KernelStore
from piecework.store.trust import AnyFiles, OwnFiles, Trust
from piecework.values.faults import CHECKS

log = logging.getLogger("piecework")


def default_store(observer: Observer, *, strict: bool = False) -> KernelStore:
    """Return the store that the environment names: PIECEWORK_STORE, or the platform's cache folder."""
    environment = Environment.read()
    if environment.store == "memory":
        return MemoryStore()
    place = Path(environment.store)
    if not environment.store or is_remote(environment.store):
        usual = default_folder(environment.xdg_cache_home, environment.home)
        place = remote_folder(environment.store, usual) if environment.store else usual
    local = DiskStore(
        place,
        observer=observer,
        strict=strict or environment.strict,
        read_only=environment.store_read_only,
        write_only=environment.store_write_only,
        trust=trust_of(environment.trust, environment.trusted_keys),
        checks=CHECKS,
    )
    return with_remote(local, environment.store, observer) if is_remote(environment.store) else local


def with_remote(local: DiskStore, url: str, observer: Observer) -> KernelStore:
    """Put the remote of a URL behind a folder."""
    from piecework.store.link import Link
    from piecework.store.remote import RemoteStore

    return RemoteStore(local, Link(url, observer=observer), observer=observer)


def trust_of(policy: str, trusted_keys: str) -> Trust:
    """Return the trust policy of a name: `own` (the default), `signed` with a file of public keys, or `any`."""
    if policy in ("", "own"):
        return OwnFiles()
    if policy == "any":
        return AnyFiles()
    if policy == "signed":
        if not trusted_keys:
            raise OptionError("trust policy `signed` needs public keys", hint="set PIECEWORK_TRUSTED_KEYS=FILE")
        from piecework.store.keys import read_trusted
        from piecework.store.signing import SignedRecords

        return SignedRecords(read_trusted(Path(trusted_keys)))
    raise OptionError(f"trust policy `{policy}` is unknown", hint="use own, signed or any")


def report_to_log(event: Any) -> None:
    """Log what a user must know (slower ways taken, trouble in the store), and at INFO how a cold start gets on."""
    part = f"{event.part}: " if event.part else ""
    match event:
        case FallBack():
            log.warning("%s%s: %s", part, event.what, event.reason)
        case StoreWarning():
            log.warning("store: `%s`: %s", event.path, event.reason)
        case RecordMiss():
            log.info("%sno stored program is used: %s", part, event.reason)
            _tell_nearest(event)
        case Phase(name="trace"):
            log.info("%straced in %.1f s", part, event.elapsed_s)
        case PassDone() if event.note:
            log.warning("%spass %s: %s", part, event.name, event.note)
        case SplitDone():
            log.info("%s%d regions, %d distinct pieces", part, event.regions, event.distinct)
        case CutInside():
            counts = f"{event.regions} regions, {event.opaque} opaque"
            log.info("%s%s for %s is cut into %s", part, event.piece, event.range, counts)
        case ArtifactCompiled():
            log.info("%scompiled %s for %s in %.1f s", part, event.piece, event.range, event.elapsed_s)
            _tell_nearest(event)
        case ArtifactReused():
            log.info("%s%s for %s was in the store (%s)", part, event.piece, event.range, event.layer)


def _tell_nearest(event: RecordMiss | ArtifactCompiled) -> None:
    if event.nearest:
        log.info("the nearest one, %s, differs in %s", event.nearest, "; ".join(event.factors))
