"""An engine for a model folder: eager as soon as its weights are in, or compiled at once where the store holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from piecework.api.location import locate
from piecework.api.opening import Loaded, Opening
from piecework.api.stores import default_store, report_to_log
from piecework.engine.loop import Engine
from piecework.engine.options import NOW, EngineOptions, Progress
from piecework.engine.service import Report
from piecework.engine.tiers import CAPTURED, COMPILED
from piecework.errors import OptionError, PieceworkError
from piecework.events import FallBack, Observer
from piecework.models.folder import open_folder
from piecework.options import NONE, STOCK, CompileOptions
from piecework.pipeline import find
from piecework.store.protocol import KernelStore

if TYPE_CHECKING:  # what one process alone does without
    from piecework.engine.follow import Follower
    from piecework.parallel.ranks import Ranks


def unheard(progress: Progress) -> None:
    """Report nothing."""


def serving_options(options: CompileOptions | None, engine: EngineOptions) -> CompileOptions:
    """Return complete options for a program that an engine serves: one general range, as long as its steps.

    Ranges that were chosen are kept; size 1 is none, since an engine pads its shortest steps to two rows.
    """
    given = options or CompileOptions()
    most = engine.max_num_batched_tokens
    # Options that were completed before they came here hold the ranges that nobody chose.
    is_chosen = given.ranges not in (None, replace(given, ranges=None).resolve().ranges)
    ranges = given.ranges if is_chosen else ((2, most),)
    return replace(given, max_num_batched_tokens=most, size_one=False, ranges=ranges).resolve()


def open_engine(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    options: CompileOptions | None = None,
    engine: EngineOptions | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
    offline: bool = False,
    report: Report = unheard,
    ranks: Ranks | None = None,
    asked_to_end: Callable[[], None] = lambda: None,
) -> Engine:
    """Open a model folder for serving; `report` hears how far loading is.

    With a record in the store the compiled program serves from the first step, and no model library is imported. Else
    eager serves at once, a process of its own compiles, and what it made is swapped in once it was verified.
    Where several `ranks` share the model, rank 0 calls this while the others call `open_follower`; `asked_to_end` is
    called where one of those was asked to end.
    """
    wanted = engine or EngineOptions()
    opening, kept = _open(model, dtype, device, options, wanted, store, observer, offline, report)
    if ranks is not None:
        from piecework.api.led import lead_engine

        made = lead_engine(opening, kept, ranks, asked_to_end)
    elif opening.settings.tensor_parallel_size > 1:
        raise OptionError(
            f"an engine over {opening.settings.tensor_parallel_size} ranks was asked for, and none were joined",
            hint="give `ranks`, which `piecework.api.together.join_ranks` returns on each of them",
        )
    else:
        made = opening.engine(_load_alone(opening, kept), kept)
    if kept is not None and wanted.wait_for != NOW:
        made.wait_for(COMPILED if wanted.wait_for == "compiled" else CAPTURED)
    return made


def open_follower(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    options: CompileOptions | None = None,
    engine: EngineOptions | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
    offline: bool = False,
    ranks: Ranks,
) -> Follower:
    """Open a model folder on a rank other than 0; what comes back runs the steps of rank 0's engine."""
    from piecework.api.led import make_follower

    wanted = engine or EngineOptions()
    opening, kept = _open(model, dtype, device, options, wanted, store, observer, offline, unheard)
    return make_follower(opening, kept, ranks)


def _open(
    model: str | Path,
    dtype: str,
    device: str,
    options: CompileOptions | None,
    engine: EngineOptions,
    store: KernelStore | None,
    observer: Observer | None,
    offline: bool,
    report: Report,
) -> tuple[Opening, KernelStore | None]:
    """Return what opens a folder, and the store of its programs; None where nothing is compiled."""
    watch = observer or report_to_log
    folder = open_folder(locate(model, offline=offline))
    settings = serving_options(options, engine)
    opening = Opening(folder, dtype, device, settings, engine, watch, report)
    if engine.enforce_eager or settings.mode in (NONE, STOCK):
        return opening, None
    return opening, store if store is not None else default_store(watch, strict=settings.strict)


def _load_alone(opening: Opening, store: KernelStore | None) -> Loaded:
    """Load what the store holds, or the model as it is where that is nothing that can be bound."""
    found = find(opening.request(), store, opening.observer) if store is not None else None
    try:
        return opening.load_eager() if found is None or store is None else opening.load_stored(*found, store)
    except (PieceworkError, OSError) as error:
        opening.observer(FallBack(what="the stored program is not served", reason=str(error).splitlines()[0]))
        return opening.load_eager()
