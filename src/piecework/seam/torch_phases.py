"""Torch's own account of what its compiler does, as sub-phases of ours.

Dynamo, AOTAutograd and Inductor tell one logger of torch when each of their phases begins and ends; it is replaced by
one that also tells whoever observes the span around. The names are torch's, as they stand in its own traces.
"""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager
from typing import Any

from piecework.span_events import SubPhase
from piecework.spans import span_observer, spanning


def observe_torch() -> None:
    """Let torch's phases be observed, from now on for the life of the process; nothing where nobody observes."""
    if span_observer() is None:
        return
    from torch._dynamo import utils

    if getattr(utils, "CHROMIUM_EVENT_LOG", None).__class__ is not _observing_logger():
        utils.CHROMIUM_EVENT_LOG = _observing_logger()()


@functools.cache
def _observing_logger() -> Any:
    from torch._dynamo import utils

    class ObservingLogger(utils.ChromiumEventLogger):
        """Torch's logger of phases, that tells us of each as well."""

        def log_event_start(self, event_name: str, *args: Any, **keywords: Any) -> None:
            super().log_event_start(event_name, *args, **keywords)
            watch = span_observer()
            if watch is not None:
                opened = spanning(watch)
                _open(self.tls).append((event_name, time.perf_counter_ns(), opened.__enter__(), opened))

        def log_event_end(self, event_name: str, *args: Any, **keywords: Any) -> None:
            super().log_event_end(event_name, *args, **keywords)
            stack = _open(self.tls)
            if not any(name == event_name for name, *_ in stack):
                return
            # A phase that was left by an exception may not have ended for the logger.
            while stack:
                name, start_ns, number, opened = stack.pop()
                opened.__exit__(None, None, None)
                watch = span_observer()
                if watch is not None:
                    watch(SubPhase(name=name, start_ns=start_ns, span=number))
                if name == event_name:
                    return

    return ObservingLogger


def _open(local: Any) -> list[tuple[str, int, int, AbstractContextManager[int]]]:
    if not hasattr(local, "piecework"):
        local.piecework = []
    found: list[tuple[str, int, int, AbstractContextManager[int]]] = local.piecework
    return found
