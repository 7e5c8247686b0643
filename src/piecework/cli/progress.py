"""A bar on standard error while something takes time, where that is a terminal; log lines stand for it elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from piecework.cli.output import start_logging
from piecework.events import (
    ArtifactCompiled,
    ArtifactLoaded,
    ArtifactReused,
    Event,
    Observer,
    Phase,
    RecordHit,
    RecordMiss,
    SplitDone,
    ignore,
)

# What is under way once a phase has ended.
_NEXT = {"model": "tracing", "trace": "cutting", "compile": "reading weights", "weights": "loading artifacts"}


class ProgressBar:
    """Draw what is under way: the artifacts that are still to be compiled as a bar, all else as a turning mark."""

    def __init__(self, bars: Any) -> None:
        self.bars = bars
        self.task = bars.add_task("looking for the program", total=None)

    def __call__(self, event: Event) -> None:
        match event:
            case RecordMiss():
                self.bars.update(self.task, description="building the model", total=None)
            case RecordHit():
                self.bars.update(self.task, description="reading weights", total=None)
            case SplitDone() if event.artifacts:
                self.bars.update(self.task, description="compiling", total=event.artifacts, completed=0)
            case ArtifactCompiled() | ArtifactReused() | ArtifactLoaded():
                self.bars.advance(self.task)
            case Phase() if event.name in _NEXT:
                self.bars.update(self.task, description=_NEXT[event.name], total=None)


class _LogThroughBars(logging.Handler):
    """Print log lines above the bar."""

    def __init__(self, console: Any) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Observer]:
    """Give an observer that draws progress until the block ends, and send the log where it does not tear the bar."""
    if not sys.stderr.isatty():
        start_logging()
        yield ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        start_logging(_LogThroughBars(console))
        try:
            yield ProgressBar(bars)
        finally:
            start_logging()
