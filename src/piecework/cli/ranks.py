"""A command that several processes run together: one of them answers, and one tells what failed."""

from __future__ import annotations

from collections.abc import Iterator
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


def refuse_sharing(size: int, command: str) -> None:
    """Raise OptionError where a command that one process runs is asked to share a model."""
    if size > 1:
        raise OptionError(
            f"`piecework {command}` run in one process, and `--tensor-parallel-size` is `{size}`",
            hint="`torchrun … piecework generate MODEL -tp N` shares a model; `piecework build -tp N` fills its store",
        )
