"""A start of several ranks that share a model: joined, agreed on one program, and let into each other's sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from piecework.env import read_variables
from piecework.events import Observer, phase
from piecework.pipeline import Request, find, find_or_build
from piecework.stages.find import read_program, require_artifacts
from piecework.store.protocol import KernelStore
from piecework.values.key import key_of
from piecework.values.placement import group_name
from piecework.values.record import Record

if TYPE_CHECKING:  # what one process alone does without
    from piecework.parallel.ranks import Ranks

Result = TypeVar("Result")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def join_ranks(ranks: int, device: str) -> Ranks:
    """Join the other ranks of a start; raise OptionError where the launcher started another number of them."""
    from piecework.parallel.ranks import join

    return join(ranks, device, read_variables(LAUNCHER))


def start_building(ranks: int) -> AbstractContextManager[None]:
    """Let what is compiled for several ranks be tried in this process alone, until the block ends."""
    if ranks < 2:
        return nullcontext()
    from piecework.seam.groups import standing_in

    return standing_in(group_name(ranks), ranks)


def start_together(
    ranks: Ranks,
    request: Request,
    finish: Callable[[str, Record], Result],
    store: KernelStore,
    observer: Observer,
) -> Result:
    """Return what `finish` makes of the one record that all ranks start from; whatever fails on one fails on all."""
    from piecework.parallel.agree import Start, agree, together

    with phase(observer, "ranks", f"{ranks.size} ranks"):
        ranks.must_agree(key_of(request.factors), "the programs that the ranks ask for")

    def read(key: str) -> Record:
        record = read_program(key, store)
        require_artifacts(record, store)
        return record

    start = Start(
        find=lambda: find(request, store, observer),
        build=lambda: find_or_build(request, store, observer),
        read=read,
    )
    with start_building(ranks.size):
        key, record = agree(ranks, start, store, observer)
        result, _ = together(ranks, "binding the program", lambda: (finish(key, record), None))
    ranks.enter()
    return result


@contextmanager
def going_on_together(ranks: Ranks | None) -> Iterator[None]:
    """Raise ParallelError where another rank is gone while the block computes."""
    if ranks is None:
        yield
        return
    from piecework.parallel.ranks import telling_of_loss

    with telling_of_loss(ranks.placement):
        yield
