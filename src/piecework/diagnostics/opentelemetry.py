"""Spans for OpenTelemetry (`pip install piecework[otel]`): each of ours, with its parent, its times and its fields."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import TracerProvider

import piecework
from piecework.diagnostics.run_file import title
from piecework.events import Event

_NOT_FIELDS = ("event", "start_ns", "end_ns", "process", "thread", "parent", "span")
_Place = tuple[int, int]


class OpenTelemetrySpans:
    """Give each event that takes time to a tracer as a span, once the span that it lies in is over.

    Events come when they end, those inside before those around: they are kept until the outermost has ended, and are
    then told from the outside in. What takes no time becomes an event of the span around it. Without a provider the
    one that the process has set is asked.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("piecework", piecework.__version__, provider)
        # Of the clock that events are told on, and the one that tracers know.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._waiting: dict[_Place, list[Event]] = defaultdict(list)
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.parent:
                self._waiting[event.process, event.parent].append(event)
                return
        if event.takes_time:
            self._tell(event, None)

    def _tell(self, event: Event, context: Any) -> None:
        span = self._tracer.start_span(
            title(event.as_dict()), context, attributes=_attributes(event), start_time=event.start_ns + self._offset_ns
        )
        around = trace.set_span_in_context(span, context)
        with self._lock:
            inside = self._waiting.pop((event.process, event.span), []) if event.span else []
        for each in inside:
            if each.takes_time:
                self._tell(each, around)
            else:
                span.add_event(title(each.as_dict()), _attributes(each), each.end_ns + self._offset_ns)
        span.end(event.end_ns + self._offset_ns)


def _attributes(event: Event) -> dict[str, Any]:
    """Return an event's own fields as attributes: what is no plain value stands as text."""
    found: dict[str, Any] = {}
    for name, value in event.as_dict().items():
        if name not in _NOT_FIELDS and value not in ("", ()):
            found[f"piecework.{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return found | {
        "piecework.event": type(event).__name__,
        "process.pid": event.process,
        "thread.id": event.thread,
    }
