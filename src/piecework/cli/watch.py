"""What a command leaves of its run: the timeline as a file, each event as a line of another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from piecework.errors import PieceworkError

if TYPE_CHECKING:
    from piecework.cli.flags import WatchFlags
    from piecework.diagnostics.timeline import Timeline
    from piecework.events import Observer

_FLAG = "--timeline"


@dataclass
class _Watch:
    """The timeline of the command under way, and where it goes once the flags are read."""

    timeline: Timeline
    arguments: ExitStack  # open until they are read
    path: Path | None = None


_watch: ContextVar[_Watch | None] = ContextVar("piecework_watch", default=None)


def timed(arguments: Sequence[str], work: Callable[[Sequence[str]], int]) -> int:
    """Run a command; where it is asked for its timeline, watch from before the first import, and write it at the end.

    A command that fails leaves its timeline too.
    """
    if not any(each == _FLAG or each.startswith(f"{_FLAG}=") for each in arguments):
        return work(arguments)
    from piecework.diagnostics.imports import ImportClock
    from piecework.diagnostics.timeline import Timeline
    from piecework.events import phase

    watch = _Watch(Timeline(["piecework", *arguments]), ExitStack())
    token = _watch.set(watch)
    try:
        with ImportClock(watch.timeline), watch.arguments:
            watch.arguments.enter_context(phase(watch.timeline, "arguments"))
            code = work(arguments)
    finally:
        _watch.reset(token)
    return code if watch.path is None else _write(watch.timeline, watch.path, code)


def _write(timeline: Timeline, path: Path, code: int) -> int:
    from piecework.cli.output import print_error
    from piecework.diagnostics.attribution import attribute

    try:
        run = timeline.write(path)
    except PieceworkError as error:
        print_error(error.message, error.hint)
        return code or error.exit_code
    found = attribute(run)
    print(
        f"timeline: {100 * found.explained:.1f} % of {run.wall_ns / 1e9:.2f} s is attributed, "
        f"{sum(gap.elapsed_s for gap in found.gaps):.2f} s is not; `{path}` opens in Perfetto",
        file=sys.stderr,
    )
    return code


@contextmanager
def watchers(flags: WatchFlags) -> Iterator[list[Observer]]:
    """Give the observers that a command's flags ask for, until the block ends."""
    found: list[Observer] = []
    watch = _watch.get()
    if watch is not None:
        watch.arguments.close()
    if watch is not None and flags.timeline is not None:
        watch.path = flags.timeline
        found.append(watch.timeline)
    if flags.events is None:
        yield found
        return
    from piecework.diagnostics.event_lines import EventLines

    with EventLines(flags.events) as lines:
        yield [*found, lines]
