"""An engine for a model folder: eager as soon as its weights are in, or compiled at once where the store holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import piecework.ops
from piecework.api.climbing import compile_job, private_store, unproven_artifacts
from piecework.api.drift import bind_texts
from piecework.api.folder import folder_request
from piecework.api.location import locate
from piecework.api.programs import read_weights
from piecework.api.served import serve_folder, step_function
from piecework.api.stores import default_store, report_to_log
from piecework.capture_options import CaptureOptions
from piecework.engine.batch import captured_sizes, empty_step
from piecework.engine.compiling import Job
from piecework.engine.generate import StepFunction
from piecework.engine.loop import Engine
from piecework.engine.options import BYTES, NOW, EngineOptions, Progress
from piecework.engine.served import Served
from piecework.engine.service import Report
from piecework.engine.text import read_tokenizer
from piecework.engine.tiers import CAPTURED, COMPILED, Tiers
from piecework.errors import PieceworkError
from piecework.events import FallBack, Observer, phase
from piecework.models.folder import ModelFolder, Site, open_folder, site_from
from piecework.ops import AttentionBackend, Step
from piecework.options import NONE, STOCK, CompileOptions
from piecework.pipeline import bind_record, find
from piecework.runtime.program import Program
from piecework.stages.find import with_siblings
from piecework.store.protocol import FolderStore, KernelStore
from piecework.values.phases import DECODE


def unheard(progress: Progress) -> None:
    """Report nothing."""


def serving_options(options: CompileOptions | None, engine: EngineOptions) -> CompileOptions:
    """Return complete options for a program that an engine serves: one general range, as long as its steps.

    Ranges that were chosen are kept; size 1 is none, since an engine pads its shortest steps to two rows.
    """
    given = options or CompileOptions()
    most = engine.max_num_batched_tokens
    ranges = ((2, most),) if given.ranges == CompileOptions().ranges else given.ranges
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
) -> Engine:
    """Open a model folder for serving; `report` hears how far loading is.

    With a record in the store the compiled program serves from the first step, and no model library is imported. Else
    eager serves at once, a process of its own compiles, and what it made is swapped in once it was verified.
    """
    wanted = engine or EngineOptions()
    watch = observer or report_to_log
    folder = open_folder(locate(model, offline=offline))
    settings = serving_options(options, wanted)
    opening = _Opening(folder, dtype, device, settings, wanted, watch, report)
    if wanted.enforce_eager or settings.mode in (NONE, STOCK):
        return opening.eager_alone()
    kept = store if store is not None else default_store(watch, strict=settings.strict)
    made = opening.warm(kept) or opening.cold(kept)
    if wanted.wait_for != NOW:
        made.wait_for(COMPILED if wanted.wait_for == "compiled" else CAPTURED)
    return made


class _Opening:
    """What the ways of opening one folder share."""

    def __init__(
        self,
        folder: ModelFolder,
        dtype: str,
        device: str,
        settings: CompileOptions,
        engine: EngineOptions,
        observer: Observer,
        report: Report,
    ) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.settings, self.engine = settings, engine
        self.observer, self.report = observer, report

    def eager_alone(self) -> Engine:
        """Serve the model as it is."""
        served, _ = self._load_eager()
        return Engine(served, self.engine, tiers=Tiers(served.step, self.observer))

    def cold(self, store: KernelStore) -> Engine:
        """Serve the model as it is, and compile it beside that."""
        served, weights = self._load_eager()
        tiers = Tiers(served.step, self.observer, num_sites=len(served.sites))
        shared = store.fillable() or private_store()
        self._climb(tiers, served, shared, weights, self._job(shared), on_proven=store.write_back)
        return Engine(served, self.engine, tiers=tiers)

    def warm(self, store: KernelStore) -> Engine | None:
        """Serve what the store holds; None where it holds nothing that can be bound."""
        from piecework.engine.climb import capture

        request = folder_request(self.folder, self.dtype, self.device, self.settings)
        found = find(request, store, self.observer)
        if found is None:
            return None
        key, record = found
        try:
            with phase(self.observer, "weights"):
                every = with_siblings(record, store)
                weights = read_weights(record, self.folder.path, every, cast=True, hear=self._loading)
                weights = {name: tensor.to(self.device) for name, tensor in weights.items()}
            program = bind_record(key, record, weights, piecework.ops.BODIES, store, self.observer)
            unproven = unproven_artifacts(record, store)
            texts = bind_texts(program, piecework.ops.BODIES, store)
        except (PieceworkError, OSError) as error:
            self.observer(FallBack(what="the stored program is not served", reason=str(error).splitlines()[0]))
            return None
        notes = record.notes
        served = self._served(
            step_function(texts, bool(notes["keeps_rows"])),
            tuple(site_from(site) for site in notes["sites"]),
            getattr(torch, notes["dtype"]),
            bool(notes["keeps_rows"]),
            weights,
        )
        tiers = Tiers(served.step, self.observer, num_sites=len(served.sites))
        if unproven:
            shared = store.fillable() if isinstance(self.settings.compiler, str) else None
            job = self._job(shared) if shared is not None else None
            self._climb(tiers, served, store, weights, job, key=key, bound=program)
        else:
            step_of = partial(step_function, keeps_rows=served.keeps_rows)
            tiers.swap_in(COMPILED, step_of(program), key)
            captured = self._capture_of(tiers, served.backend)
            if captured is not None:
                tiers.climb(capture(tiers, captured(program), step_of, self.engine.idle_ms))
        return Engine(served, self.engine, tiers=tiers)

    def _climb(
        self,
        tiers: Tiers,
        served: Served,
        store: KernelStore,
        weights: Mapping[str, torch.Tensor],
        job: Job | None,
        *,
        key: str = "",
        bound: Program | None = None,
        on_proven: Callable[[str], None] = lambda key: None,
    ) -> None:
        """Have upper tiers made while the engine serves."""
        from piecework.engine.climb import Plan, climb

        plan = Plan(
            store=store,
            bind=lambda key, record: bind_record(key, record, weights, piecework.ops.BODIES, store, self.observer),
            step_of=partial(step_function, keeps_rows=served.keeps_rows),
            job=job,
            key=key,
            bound=bound,
            capture=self._capture_of(tiers, served.backend),
            idle_ms=self.engine.idle_ms,
            on_proven=on_proven,
        )
        tiers.climb(climb(tiers, plan, self.observer))

    def _job(self, store: FolderStore) -> Job:
        """Return what a compile process is asked for."""
        return compile_job(self.folder, self.dtype, self.device, self.settings, self.engine, store)

    def _capture_of(self, tiers: Tiers, backend: AttentionBackend) -> Callable[[Program], Any] | None:
        """Return what captures a program when there is time for it; None where nothing is captured.

        Decode is captured whole, but where attention plans on the host: it stands between graphs there.
        """
        if torch.device(self.device).type != "cuda":
            return None
        from piecework.api.captures import capture

        options = CaptureOptions(
            decode="full" if backend.capturable else "piecewise",
            prefill="piecewise",
            decode_sizes=captured_sizes(self.engine.max_num_sequences),
            prefill_sizes=captured_sizes(self.engine.max_num_batched_tokens),
            when="idle",
            results="borrowed",
        )

        def step(phase: str, size: int) -> Step:
            most_pages = tiers.most_pages if phase == DECODE and backend.capturable else 0
            return empty_step(tiers.caches, size, self.device, backend, most_pages)

        return lambda program: capture(
            program,
            options=options,
            steps=step,
            phase_of=lambda: tiers.phase,
            observer=self.observer,
        )

    def _load_eager(self) -> tuple[Served, Mapping[str, torch.Tensor]]:
        from piecework.models.hugging_face import load_model

        with phase(self.observer, "weights"):
            loaded = load_model(self.folder.path, dtype=self.dtype, device=self.device, hear=self._loading)
        kept = loaded.model.state_dict(keep_vars=True)
        step = step_function(loaded.model, loaded.keeps_rows)
        served = self._served(step, loaded.sites, loaded.dtype, loaded.keeps_rows, kept)
        return served, {**dict(loaded.model.named_buffers(remove_duplicate=False)), **kept}

    def _loading(self, done_bytes: int, total_bytes: int) -> None:
        """Report how much of the weights was read."""
        self.report(Progress("loading", done_bytes, total_bytes, unit=BYTES))

    def _served(
        self,
        step: StepFunction,
        sites: tuple[Site, ...],
        dtype: torch.dtype,
        keeps_rows: bool,
        weights: Mapping[str, torch.Tensor],
    ) -> Served:
        return serve_folder(
            self.folder, step, sites, dtype=dtype, device=self.device, keeps_rows=keeps_rows,
            tokenizer=read_tokenizer(self.folder) if self.folder.tokenizer_file is not None else None,
            weights_bytes=sum({t.data_ptr(): t.numel() * t.element_size() for t in weights.values()}.values()),
        )  # fmt: skip
