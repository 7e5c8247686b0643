"""A command that several processes run together: one of them answers, and one tells what failed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from piecework.env import read_variables
from piecework.errors import OptionError, PieceworkError

if TYPE_CHECKING:
    from piecework.parallel.ranks import Ranks


@contextmanager
def sharing(size: int, device: str) -> Iterator[Ranks | None]:
    """Join the other ranks of a command until the block ends; None where it runs in one process.

    An error is raised on the rank that is first to tell it; the others end with the same exit code, and say nothing.
    """
    if size < 2:
        yield None
        return
    from piecework.api.together import join_ranks

    try:
        ranks = join_ranks(size, device)
    except OptionError as error:  # all ranks were started alike, so all find it
        if read_variables(("RANK",)).get("RANK", "0") != "0":
            raise SystemExit(error.exit_code) from None
        raise
    try:
        yield ranks
    except PieceworkError as error:
        if not ranks.claim("error"):
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        ranks.leave()


@contextmanager
def noting_signals() -> Iterator[Callable[[], bool]]:
    """Give what tells whether SIGTERM or SIGINT came, until the block ends: launchers send them to every rank.

    A rank that follows another ends when that one does, which finishes open answers first.
    """
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
