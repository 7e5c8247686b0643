"""Model folders: build a store for one, open one as a program; warm, no model library is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import piecework.ops
from piecework.api.drift import watch_drift
from piecework.api.lazy import on_demand
from piecework.api.live import evaluate_guards, refuse_direct
from piecework.api.location import locate
from piecework.api.programs import read_weights
from piecework.api.stores import default_store, report_to_log
from piecework.api.together import join_ranks, start_building, start_together
from piecework.engine import requests
from piecework.env import read_variables
from piecework.errors import OptionError
from piecework.events import Observer, Ready, phase
from piecework.models.folder import ModelFolder, Site, open_folder, site_from
from piecework.options import NONE, STOCK, CompileOptions
from piecework.pipeline import Request, bind_record, start_from
from piecework.runtime.program import Program
from piecework.seam.surroundings import variables
from piecework.stages.find import require_artifacts, with_siblings
from piecework.store.protocol import KernelStore
from piecework.values.placement import ALONE, Placement
from piecework.values.record import Record

if TYPE_CHECKING:  # what one process alone does without
    from piecework.parallel.ranks import Ranks

Alter = Callable[[Request], Request]


def unaltered(request: Request) -> Request:
    """Ask for what was asked."""
    return request


@dataclass(frozen=True)
class Built:
    """A program in the store: its key, its record, and the folder it was made of."""

    key: str
    record: Record
    folder: ModelFolder


@dataclass(frozen=True)
class OpenModel:
    """A model ready to generate: `program` takes flat tokens, `sites` say what each layer's cache holds."""

    program: Callable[..., Any]
    folder: ModelFolder
    sites: tuple[Site, ...]
    keeps_rows: bool
    dtype: torch.dtype
    device: str
    max_num_batched_tokens: int
    record: Record | None = None
    ranks: Ranks | None = None

    def step(self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Run one step over flat tokens.

        Tensors:
            input_ids     [1, T]     i64
            position_ids  [1, T]     i64
            rows          [B]        i64    which tokens' logits are wanted
            ->            [1, B, V]  model  all T rows where the model cannot choose
        """
        if self.keeps_rows:
            return self.program(input_ids=input_ids, position_ids=position_ids, logits_to_keep=rows)  # type: ignore[no-any-return]
        return self.program(input_ids=input_ids, position_ids=position_ids)  # type: ignore[no-any-return]


def build_folder(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    options: CompileOptions | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
    offline: bool = False,
    alter: Alter = unaltered,
) -> Built:
    """Fill the store for a model folder; needs its configuration, not its weights, and runs nothing.

    `alter` may change the request before it is looked up: to see each value on the way, or to replace one.
    """
    settings = (options or CompileOptions()).resolve()
    if settings.mode in (NONE, STOCK):
        raise OptionError(f"mode `{settings.mode}` has nothing to build", hint="build in mode piecewise or trace_once")
    refuse_direct(settings.keyed(), "what is built into a store")
    watch = observer or report_to_log
    kept = store if store is not None else default_store(watch, strict=settings.strict)
    with phase(watch, "request"):
        folder = open_folder(locate(model, offline=offline))
        request = alter(folder_request(folder, dtype, device, settings))

    def finish(key: str, record: Record) -> Built:
        require_artifacts(record, kept)
        return Built(key, record, folder)

    with start_building(settings.tensor_parallel_size):
        return start_from(request, finish, kept, watch)


def open_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    options: CompileOptions | None = None,
    store: KernelStore | None = None,
    observer: Observer | None = None,
    offline: bool = False,
    alter: Alter = unaltered,
    ranks: Ranks | None = None,
) -> OpenModel:
    """Open a model folder for generation: its program from the store, or built into it, bound to its weights.

    Where several ranks share the model, each calls this; `ranks` are those that were joined already.
    """
    settings = (options or CompileOptions()).resolve()
    watch = observer or report_to_log
    is_compiled = settings.mode not in (NONE, STOCK)
    with phase(watch, "request"):
        folder = open_folder(locate(model, offline=offline))
        request = alter(folder_request(folder, dtype, device, settings)) if is_compiled else None
    if settings.tensor_parallel_size > 1 and ranks is None:
        ranks = join_ranks(settings.tensor_parallel_size, device)
    placement = ranks.placement if ranks is not None else ALONE
    if request is None:
        return _open_uncompiled(folder, dtype, device, settings, watch, ranks)
    kept = store if store is not None else default_store(watch, strict=settings.strict)

    def finish(key: str, record: Record) -> OpenModel:
        with phase(watch, "weights"):
            weights = {name: tensor.to(device) for name, tensor in _read(record, folder, kept, placement).items()}
        lazy = on_demand(request, settings.lazy_sizes, kept, watch)
        program = bind_record(key, record, weights, piecework.ops.BODIES, kept, watch, on_demand=lazy)
        evaluate_guards(program, request)
        watch_drift(program, piecework.ops.BODIES, kept, settings.drift_every, watch)
        watch(Ready(keys=(key,)))
        return _opened(program, folder, record, device, settings, ranks)

    if ranks is not None:
        return start_together(ranks, request, finish, kept, watch)
    return start_from(request, finish, kept, watch)


def _read(
    record: Record, folder: ModelFolder, store: KernelStore, placement: Placement
) -> dict[str, torch.Tensor]:
    return read_weights(record, folder.path, with_siblings(record, store), cast=True, placement=placement)


def _opened(
    program: Program,
    folder: ModelFolder,
    record: Record,
    device: str,
    settings: CompileOptions,
    ranks: Ranks | None,
) -> OpenModel:
    notes = record.notes
    return OpenModel(
        program=program,
        folder=folder,
        sites=tuple(site_from(site) for site in notes["sites"]),
        keeps_rows=bool(notes["keeps_rows"]),
        dtype=getattr(torch, notes["dtype"]),
        device=device,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        record=record,
        ranks=ranks,
    )


def folder_request(folder: ModelFolder, dtype: str, device: str, settings: CompileOptions) -> Request:
    """Return what is asked of the pipeline for a model folder under complete options."""
    given = read_variables((*variables(device), "CXX"))
    return requests.folder_request(folder, dtype, device, settings, _load_model, given)


def _load_model(*args: Any, **kwargs: Any) -> Any:
    from piecework.models.hugging_face import load_model

    return load_model(*args, **kwargs)


def _open_uncompiled(
    folder: ModelFolder, dtype: str, device: str, settings: CompileOptions, observer: Observer, ranks: Ranks | None
) -> OpenModel:
    """Open a folder's model as it is (mode `none`), or under torch's own compile (mode `stock`)."""
    from piecework.models.hugging_face import load_model

    with phase(observer, "weights"):
        placement = ranks.placement if ranks is not None else ALONE
        loaded = load_model(folder.path, dtype=dtype, device=device, placement=placement)
    if ranks is not None:
        ranks.enter()
    call: Callable[..., Any] = loaded.model
    if settings.mode == STOCK:
        from piecework.seam.stock import compile_stock

        call = compile_stock(loaded.model, observer)
    observer(Ready())
    return OpenModel(
        call, folder, loaded.sites, loaded.keeps_rows, loaded.dtype, device, settings.max_num_batched_tokens,
        ranks=ranks,
    )  # fmt: skip
