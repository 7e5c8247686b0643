"""What the ways of opening one model folder for serving share: its weights read, its tiers made ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

import piecework.ops
from piecework.api.climbing import compile_job, private_store, unproven_artifacts
from piecework.api.drift import bind_texts
from piecework.api.folder import folder_request
from piecework.api.programs import read_weights
from piecework.api.served import serve_folder, step_function
from piecework.capture_options import CaptureOptions
from piecework.engine.batch import captured_sizes, empty_step
from piecework.engine.compiling import Job
from piecework.engine.generate import StepFunction
from piecework.engine.loop import Engine
from piecework.engine.options import BYTES, EngineOptions, Progress
from piecework.engine.served import Served
from piecework.engine.service import Report
from piecework.engine.text import read_tokenizer
from piecework.engine.tiers import COMPILED, Tiers
from piecework.events import Observer, phase
from piecework.models.folder import ModelFolder, Site, site_from
from piecework.ops import AttentionBackend, PagedCache, Step
from piecework.options import CompileOptions
from piecework.pipeline import Request, bind_record
from piecework.runtime.program import Program
from piecework.stages.find import with_siblings
from piecework.store.protocol import FolderStore, KernelStore
from piecework.values.phases import DECODE
from piecework.values.placement import ALONE, Placement
from piecework.values.record import Record

if TYPE_CHECKING:  # what one process alone does without
    from piecework.engine.lead import Lead

Bind = Callable[[str, Record], Program]


class Stepping(Protocol):
    """What a capture asks of whoever steps: the phase under way, the pages, and how many a sequence may have."""

    phase: str
    caches: Mapping[str, PagedCache]
    most_pages: int


@dataclass(frozen=True)
class Loaded:
    """A folder whose weights are in: how its eager step is run, and the stored program where there is one."""

    served: Served
    weights: Mapping[str, torch.Tensor]
    key: str = ""
    program: Program | None = None
    is_proven: bool = False


class Opening:
    """What opening one folder goes by. With a `placement` what is loaded is that rank's share."""

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
        self.settings, self.options = settings, engine
        self.observer, self.report = observer, report
        self.placement: Placement = ALONE

    def request(self) -> Request:
        """Return what is asked of the pipeline."""
        return folder_request(self.folder, self.dtype, self.device, self.settings)

    def load_eager(self) -> Loaded:
        """Load the model as it is."""
        from piecework.models.hugging_face import load_model

        with phase(self.observer, "weights"):
            loaded = load_model(
                self.folder.path, dtype=self.dtype, device=self.device, hear=self._loading, placement=self.placement
            )
        kept = loaded.model.state_dict(keep_vars=True)
        step = step_function(loaded.model, loaded.keeps_rows)
        served = self._served(step, loaded.sites, loaded.dtype, loaded.keeps_rows, kept)
        return Loaded(served, {**dict(loaded.model.named_buffers(remove_duplicate=False)), **kept})

    def load_stored(self, key: str, record: Record, store: KernelStore) -> Loaded:
        """Bind what the store holds. Raises PieceworkError or OSError where it cannot be bound."""
        with phase(self.observer, "weights"):
            every = with_siblings(record, store)
            weights = read_weights(
                record, self.folder.path, every, cast=True, hear=self._loading, placement=self.placement
            )
            weights = {name: tensor.to(self.device) for name, tensor in weights.items()}
        program = bind_record(key, record, weights, piecework.ops.BODIES, store, self.observer)
        is_proven = not unproven_artifacts(record, store)
        texts = bind_texts(program, piecework.ops.BODIES, store)
        notes = record.notes
        served = self._served(
            step_function(texts, bool(notes["keeps_rows"])),
            tuple(site_from(site) for site in notes["sites"]),
            getattr(torch, notes["dtype"]),
            bool(notes["keeps_rows"]),
            weights,
        )
        return Loaded(served, weights, key, program, is_proven)

    def engine(self, loaded: Loaded, store: KernelStore | None, lead: Lead | None = None) -> Engine:
        """Make the engine: upper tiers are there, or come while it serves; without a store eager stays alone."""
        served = loaded.served
        if lead is not None:
            served = replace(served, step=lead.eager(served.step))
        tiers = Tiers(served.step, self.observer, num_sites=len(served.sites))
        if store is not None:
            self._raise_tiers(tiers, loaded, store, lead)
        return Engine(served, self.options, tiers=tiers, others=lead)

    def _raise_tiers(self, tiers: Tiers, loaded: Loaded, store: KernelStore, lead: Lead | None) -> None:
        """Serve the stored program, or have it proven, or have one compiled beside eager."""
        if loaded.program is None:
            shared = store.fillable() or private_store()
            self._climb(tiers, loaded, shared, self._job(shared), lead, on_proven=store.write_back)
        elif not loaded.is_proven:
            fillable = store.fillable() if isinstance(self.settings.compiler, str) else None
            self._climb(tiers, loaded, store, self._job(fillable) if fillable is not None else None, lead)
        else:
            from piecework.engine.climb import capture

            step_of = self._step_of(loaded, lead)
            tiers.swap_in(COMPILED, step_of(loaded.program), loaded.key)
            captured = self.capture_of(tiers, loaded.served.backend, lead)
            if captured is not None:
                tiers.climb(capture(tiers, captured(loaded.program), step_of, self.options.idle_ms))

    def _climb(
        self,
        tiers: Tiers,
        loaded: Loaded,
        store: KernelStore,
        job: Job | None,
        lead: Lead | None,
        *,
        on_proven: Callable[[str], None] = lambda key: None,
    ) -> None:
        """Have upper tiers made while the engine serves."""
        from piecework.engine.climb import Plan, climb

        bind = self.bind(store, loaded.weights)
        plan = Plan(
            store=store,
            bind=bind if lead is None else lead.binding(bind, store),
            step_of=self._step_of(loaded, lead),
            job=job,
            key=loaded.key,
            bound=loaded.program,
            capture=self.capture_of(tiers, loaded.served.backend, lead),
            idle_ms=self.options.idle_ms,
            on_proven=on_proven,
            apart=None if lead is None else lead.apart,
        )
        tiers.climb(climb(tiers, plan, self.observer))

    def bind(self, store: KernelStore, weights: Mapping[str, torch.Tensor]) -> Bind:
        """Return what binds a record of a store to weights."""
        return lambda key, record: bind_record(key, record, weights, piecework.ops.BODIES, store, self.observer)

    def _step_of(self, loaded: Loaded, lead: Lead | None) -> Callable[[Any], StepFunction]:
        step_of = partial(step_function, keeps_rows=loaded.served.keeps_rows)
        return step_of if lead is None else lead.steps_of(step_of)

    def _job(self, store: FolderStore) -> Job:
        """Return what a compile process is asked for."""
        return compile_job(self.folder, self.dtype, self.device, self.settings, self.options, store)

    def capture_of(
        self, stepping: Stepping, backend: AttentionBackend, lead: Lead | None = None
    ) -> Callable[[Program], Any] | None:
        """Return what captures a program when there is time for it; None where nothing is captured.

        Decode is captured whole, but where attention plans on the host: it stands between graphs there.
        """
        if torch.device(self.device).type != "cuda":
            return None
        from piecework.api.captures import capture

        options = CaptureOptions(
            decode="full" if backend.capturable else "piecewise",
            prefill="piecewise",
            decode_sizes=captured_sizes(self.options.max_num_sequences),
            prefill_sizes=captured_sizes(self.options.max_num_batched_tokens),
            when="idle",
            results="borrowed",
        )

        def step(phase: str, size: int) -> Step:
            most_pages = stepping.most_pages if phase == DECODE and backend.capturable else 0
            return empty_step(stepping.caches, size, self.device, backend, most_pages)

        def captured(program: Program) -> Any:
            made = capture(
                program, options=options, steps=step, phase_of=lambda: stepping.phase, observer=self.observer
            )
            return made if lead is None else lead.capturing(made, program)

        return captured

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
