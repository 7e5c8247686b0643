"""An engine that several ranks share: all load their part of a folder together; then rank 0 leads, others follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from piecework.api.opening import Loaded, Opening
from piecework.api.served import step_function
from piecework.api.together import start_building, start_of
from piecework.engine.follow import Follower
from piecework.engine.generate import allocate_caches
from piecework.engine.lead import BOUND, Lead
from piecework.engine.loop import Engine
from piecework.engine.memory import choose_pages, longest_sequence
from piecework.engine.offline import Answer, answer_from
from piecework.engine.options import EngineOptions
from piecework.engine.served import Served
from piecework.errors import BindError, ParallelError, PieceworkError
from piecework.events import FallBack, phase
from piecework.parallel.agree import deliver, error_data, look_up, together, told
from piecework.parallel.channel import Channel, open_channel
from piecework.parallel.ranks import TIMEOUT_S, Ranks
from piecework.pipeline import Request
from piecework.runtime.program import Program
from piecework.stages.find import read_program
from piecework.store.protocol import KernelStore
from piecework.values.key import key_of


@dataclass(frozen=True)
class Together:
    """What every rank has once all have loaded: its part, and the way from rank 0 to the others."""

    loaded: Loaded
    channel: Channel


def lead_engine(
    opening: Opening, store: KernelStore | None, ranks: Ranks, asked_to_end: Callable[[], None]
) -> Engine:
    """Make the engine of rank 0: each of its steps is run by all."""
    found = _load(opening, store, ranks)
    lead = Lead(found.channel, asked_to_end=asked_to_end)
    if found.loaded.program is not None:
        lead.know(found.loaded.program, BOUND)
    return opening.engine(found.loaded, store, lead)


def make_follower(opening: Opening, store: KernelStore | None, ranks: Ranks) -> Follower:
    """Make what runs rank 0's steps on another rank."""
    found = _load(opening, store, ranks)
    loaded = found.loaded

    def bind(key: str) -> Program:
        assert store is not None
        return opening.bind(store, loaded.weights)(key, read_program(key, store))

    follower = _follow(found.channel, loaded.served, opening.options, store=store, bound=loaded.program, bind=bind)
    follower.capture_of = opening.capture_of(follower, loaded.served.backend)
    return follower


def part_of(served: Served, options: EngineOptions, ranks: Ranks) -> Engine | Follower:
    """Make what a rank has of an engine over a program that all ranks are bound to: rank 0 leads it."""
    planned = replace(options, num_pages=_agree_on_pages(served, options, ranks))
    channel = open_channel(ranks, TIMEOUT_S)  # what is done between two calls is the caller's
    if ranks.rank:
        return _follow(channel, served, planned)
    lead = Lead(channel)
    return Engine(replace(served, step=lead.eager(served.step)), planned, others=lead)


def answer_together(part: Engine | Follower, ask: Callable[[Engine], list[Answer]]) -> list[Answer]:
    """Return what rank 0's engine answers, on every rank. Where that is an error, all raise it."""
    if isinstance(part, Follower):
        return [answer_from(each) for each in told(part.follow(), "answering")]
    assert isinstance(part.others, Lead)
    try:
        answers = ask(part)
    except ParallelError:
        raise
    except Exception as error:
        part.others.give({"error": error_data(error)})
        raise
    part.others.give({"error": None, "told": [asdict(each) for each in answers]})
    return answers


def _follow(channel: Channel, served: Served, options: EngineOptions, **more: Any) -> Follower:
    """Return what follows, over this rank's own cache."""
    caches = allocate_caches(
        served.sites,
        num_pages=options.num_pages, page_size=options.page_size, dtype=served.dtype, device=served.device,
    )  # fmt: skip
    longest = longest_sequence(served, options, options.num_pages)
    return Follower(
        channel,
        caches,
        eager=served.step,
        step_of=partial(step_function, keeps_rows=served.keeps_rows),
        device=served.device,
        backend=served.backend,
        most_pages=-(-longest // options.page_size),
        **more,
    )


def _load(opening: Opening, store: KernelStore | None, ranks: Ranks) -> Together:
    """Load this rank's part, as all others do at the same time; whatever fails on one fails on all."""
    opening.placement = ranks.placement
    request = opening.request() if store is not None else None
    with phase(opening.observer, "ranks", f"{ranks.size} ranks"):
        asked = [key_of(request.factors) if request is not None else "", vars(opening.options)]
        ranks.must_agree(asked, "what the ranks are asked to serve")
    loaded = _load_stored(opening, request, store, ranks) if request is not None and store is not None else None
    if loaded is None:
        loaded, _ = together(ranks, "loading the model", lambda: (opening.load_eager(), None))
    assert loaded is not None
    ranks.enter()
    opening.options = replace(opening.options, num_pages=_agree_on_pages(loaded.served, opening.options, ranks))
    return Together(loaded, open_channel(ranks, opening.options.rank_timeout_s))


def _load_stored(opening: Opening, request: Request, store: KernelStore, ranks: Ranks) -> Loaded | None:
    """Bind the program that one of the ranks has, on all; None where none has it, or one cannot bind it."""
    start = start_of(request, store, opening.observer)

    def bind(key: str) -> Loaded:
        try:
            return opening.load_stored(key, read_program(key, store), store)
        except OSError as error:
            raise BindError(f"the files cannot be read: {error}", hint="see the folder and its rights") from error

    with start_building(ranks.size):
        found = look_up(ranks, start)
        if found is None:
            return None
        key, owner = found
        try:
            deliver(ranks, start, key, owner, store, opening.observer, is_hit=True)
            loaded, _ = together(ranks, "binding the program", lambda: (bind(key), None))
        except ParallelError:
            raise
        except PieceworkError as error:  # the same on all ranks
            opening.observer(FallBack(what="the stored program is not served", reason=error.message))
            return None
    return loaded


def _agree_on_pages(served: Served, options: EngineOptions, ranks: Ranks) -> int:
    """Return the pages that every rank has memory for."""
    if options.num_pages:
        return options.num_pages
    _, counts = together(ranks, "planning the cache", lambda: (None, choose_pages(served, options, ranks=ranks.size)))
    return int(min(counts))
