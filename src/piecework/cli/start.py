"""What every command that touches a model begins with: settings, a store, and those who watch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from piecework.cli.flags import WATCH_DEFAULTS, CompileFlags, StoreFlags, WatchFlags
from piecework.cli.progress import progress
from piecework.cli.settings import Settings, gather, open_store
from piecework.cli.watch import watchers
from piecework.diagnostics.counters import Counters
from piecework.diagnostics.report_lines import ReportLines
from piecework.env import Environment
from piecework.events import Observer, fan_out
from piecework.store.protocol import KernelStore


@dataclass(frozen=True)
class Start:
    """A command under way: its settings, its store, and the counts of what happened so far."""

    settings: Settings
    store: KernelStore
    counters: Counters
    observer: Observer


@contextmanager
def starting(
    compile_flags: CompileFlags, store_flags: StoreFlags, watch_flags: WatchFlags = WATCH_DEFAULTS
) -> Iterator[Start]:
    """Gather the settings, open the store, and watch until the block ends."""
    settings = gather(compile_flags, store_flags, Environment.read())
    with progress() as draw, watchers(watch_flags) as more:
        counters = Counters()
        observer = fan_out(counters, ReportLines(str(settings.store.store)), draw, *more)
        yield Start(settings, open_store(settings, observer), counters, observer)
