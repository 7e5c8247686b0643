"""The store that a caller gets without naming one, and what is logged without an observer."""

from __future__ import annotations

import logging
from typing import Any

from piecework.env import Environment
from piecework.events import FallBack, Observer, StoreWarning
from piecework.store.disk import DiskStore
from piecework.store.layout import default_folder
from piecework.store.memory import MemoryStore
from piecework.store.protocol import KernelStore

log = logging.getLogger("piecework")


def default_store(observer: Observer, *, strict: bool = False) -> KernelStore:
    """Return the store that the environment names: PIECEWORK_STORE, or the platform's cache folder."""
    environment = Environment.read()
    if environment.store == "memory":
        return MemoryStore()
    folder = environment.store or default_folder(environment.xdg_cache_home, environment.home)
    return DiskStore(
        folder, observer=observer, strict=strict or environment.strict,
        read_only=environment.store_read_only, write_only=environment.store_write_only,
    )  # fmt: skip


def report_to_log(event: Any) -> None:
    """Log what a user must know: slower ways taken, and trouble in the store."""
    if isinstance(event, FallBack):
        log.warning("%s: %s", event.what, event.reason)
    elif isinstance(event, StoreWarning):
        log.warning("store: `%s`: %s", event.path, event.reason)
