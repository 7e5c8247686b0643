"""A start of several ranks that share a model: joined, agreed on one program, and let into each other's sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from piecework.env import read_variables
from piecework.errors import StoreError
from piecework.events import Observer, RecordMiss, phase
from piecework.pipeline import Request, build, find, find_or_build
from piecework.stages.find import read_program, require_artifacts, with_siblings
from piecework.store.protocol import KernelStore
from piecework.values.key import key_of
from piecework.values.placement import group_name
from piecework.values.record import Record

if TYPE_CHECKING:  # what one process alone does without
    from piecework.parallel.agree import Start
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
    from piecework.parallel.agree import agree, together

    with phase(observer, "ranks", f"{ranks.size} ranks"):
        ranks.must_agree(key_of(request.factors), "the programs that the ranks ask for")
    with start_building(ranks.size):
        key, record = agree(ranks, start_of(request, store, observer), store, observer)
        result, _ = together(ranks, "binding the program", lambda: (finish(key, record), None))
    ranks.enter()
    return result


def start_of(request: Request, store: KernelStore, observer: Observer) -> Start:
    """Return what a start of several ranks is made of: programs are whole, with all that a start reads."""
    from piecework.parallel.agree import Start

    def read(key: str) -> Record:
        record = read_program(key, store)
        require_artifacts(record, store)
        for one in with_siblings(record, store):
            store.read_blob(one.evidence)  # a start may do without it, and whoever is sent the program may not
        return record

    def whole(found: tuple[str, Record] | None) -> bool:
        try:
            return found is not None and read(found[0]) is not None
        except StoreError as error:
            observer(RecordMiss(lookup=key_of(request.factors), reason=error.message))
            return False

    def look() -> tuple[str, Record] | None:
        found = find(request, store, observer)
        return found if whole(found) else None

    def make() -> tuple[str, Record]:
        found = find_or_build(request, store, observer)
        return found if whole(found) else build(request, store, observer)

    return Start(find=look, build=make, read=read)


@contextmanager
def going_on_together(ranks: Ranks | None) -> Iterator[None]:
    """Raise ParallelError where another rank is gone while the block computes."""
    if ranks is None:
        yield
        return
    from piecework.parallel.ranks import telling_of_loss

    with telling_of_loss(ranks.placement):
        yield
