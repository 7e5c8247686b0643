"""Events as lines of a file, each a JSON object, written as they happen: what a log collector reads."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from piecework.errors import OptionError
from piecework.events import Event


class EventLines:
    """Append a line for each event to a file, with the moment, the thread's name and the seconds that it took.

    Lines are whole and stand in the file at once, so that a process that is killed leaves all that it did.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # closed with the observer
        except OSError as error:
            raise OptionError(
                f"events cannot be written to `{path}`: {error.strerror}", hint="give a file in a folder that exists"
            ) from error
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        where = {"time": moment, "thread_name": threading.current_thread().name}
        line = json.dumps({**where, **event.as_dict(), "elapsed_s": round(event.elapsed_s, 6)}, default=str)
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def __enter__(self) -> EventLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; events that come later are dropped."""
        with self._lock:
            self._file.close()
