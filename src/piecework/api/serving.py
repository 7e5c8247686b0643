"""An engine for a model folder: eager as soon as its weights are in, or compiled at once where the store holds it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import piecework.ops
from piecework.api.drift import bind_texts
from piecework.api.folder import folder_request
from piecework.api.location import locate
from piecework.api.programs import read_weights
from piecework.api.stores import default_store, report_to_log
from piecework.capture_options import CaptureOptions
from piecework.engine.batch import empty_step
from piecework.engine.generate import StepFunction
from piecework.engine.loop import Engine
from piecework.engine.options import NOW, EngineOptions, Progress
from piecework.engine.served import Served
from piecework.engine.service import Report
from piecework.engine.text import read_tokenizer
from piecework.engine.tiers import CAPTURED, COMPILED, Tiers
from piecework.env import read_variables
from piecework.errors import OptionError, PieceworkError
from piecework.events import FallBack, Observer, phase
from piecework.models.folder import ModelFolder, Site, open_folder, paged_sites, site_from
from piecework.options import COMPILERS, NONE, STOCK, CompileOptions
from piecework.pipeline import bind_record, find
from piecework.runtime.program import Program
from piecework.seam.surroundings import variables
from piecework.stages.find import with_siblings
from piecework.store.disk import DiskStore
from piecework.store.protocol import ARTIFACT, KernelStore
from piecework.store.trust import AnyFiles
from piecework.values.artifact import TEXT
from piecework.values.record import Record


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
        from piecework.engine.climb import Plan, climb
        from piecework.engine.compiling import Job

        served, weights = self._load_eager()
        tiers = Tiers(served.step, self.observer, num_sites=len(served.sites))
        if not isinstance(self.settings.compiler, str):
            raise OptionError(
                "a compiler that is an object does not travel to the process that compiles",
                hint=f"name one of {', '.join(COMPILERS)}, or fill the store before",
            )
        is_shared = isinstance(store, DiskStore) and not store.read_only and not store.write_only
        # What cannot be written to by two processes is left alone: this start compiles for itself.
        shared = store if is_shared else DiskStore(tempfile.mkdtemp(prefix="piecework-"))
        assert isinstance(shared, DiskStore)
        job = Job(
            folder=str(self.folder.path),
            dtype=self.dtype,
            device=self.device,
            options=plain_options(self.settings),
            store=str(shared.path),
            trust="any" if isinstance(shared.trust, AnyFiles) else "own",
            variables=read_variables((*variables(self.device), "CXX")),
            nice=self.engine.compile_nice,
        )
        plan = Plan(
            store=shared,
            bind=lambda key, record: bind_record(
                key, record, weights, piecework.ops.BODIES, shared, self.observer
            ),
            step_of=lambda program: step_function(program, served.keeps_rows),
            job=job,
            capture=self._capture_of(tiers),
            idle_ms=self.engine.idle_ms,
        )
        tiers.climb(climb(tiers, plan, self.observer))
        return Engine(served, self.engine, tiers=tiers)

    def warm(self, store: KernelStore) -> Engine | None:
        """Serve what the store holds; None where it holds nothing that can be bound."""
        from piecework.engine.climb import Plan, climb
        from piecework.engine.climb import capture as capture_sizes

        request = folder_request(self.folder, self.dtype, self.device, self.settings)
        found = find(request, store, self.observer)
        if found is None:
            return None
        key, record = found
        try:
            self.report(Progress("loading", 0, 1))
            with phase(self.observer, "weights"):
                weights = read_weights(record, self.folder.path, with_siblings(record, store), cast=True)
                weights = {name: tensor.to(self.device) for name, tensor in weights.items()}
            program = bind_record(key, record, weights, piecework.ops.BODIES, store, self.observer)
            unproven = unproven_artifacts(record, store)
            texts = bind_texts(program, piecework.ops.BODIES, store)
        except (PieceworkError, OSError) as error:
            self.observer(FallBack(what="the stored program is not served", reason=str(error).splitlines()[0]))
            return None
        self.report(Progress("loading", 1, 1))
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
            plan = Plan(
                store=store,
                bind=lambda key, record: program,
                step_of=lambda program: step_function(program, served.keeps_rows),
                key=key,
                capture=self._capture_of(tiers),
                idle_ms=self.engine.idle_ms,
            )
            tiers.climb(climb(tiers, plan, self.observer))
        else:
            step_of = partial(step_function, keeps_rows=served.keeps_rows)
            tiers.swap_in(COMPILED, step_of(program), key)
            captured = self._capture_of(tiers)
            if captured is not None:
                tiers.climb(capture_sizes(tiers, captured(program), step_of, self.engine.idle_ms))
        return Engine(served, self.engine, tiers=tiers)

    def _capture_of(self, tiers: Tiers) -> Callable[[Program], Any] | None:
        """Return what captures a program piecewise when there is time for it; None where nothing is captured.

        The reference attention plans on the host, so that it stands between graphs and not in them.
        """
        if torch.device(self.device).type != "cuda":
            return None
        from piecework.api.captures import capture

        options = CaptureOptions(
            decode="piecewise",
            prefill="piecewise",
            decode_max=min(self.engine.max_num_sequences, self.engine.max_num_batched_tokens),
            when="idle",
        )
        return lambda program: capture(
            program,
            options=options,
            steps=lambda phase, size: empty_step(tiers.caches, size, self.device),
            phase_of=lambda: tiers.phase,
            observer=self.observer,
        )

    def _load_eager(self) -> tuple[Served, Mapping[str, torch.Tensor]]:
        from piecework.models.hugging_face import load_model

        self.report(Progress("loading", 0, 1))
        with phase(self.observer, "weights"):
            loaded = load_model(self.folder.path, dtype=self.dtype, device=self.device)
        self.report(Progress("loading", 1, 1))
        kept = loaded.model.state_dict(keep_vars=True)
        step = step_function(loaded.model, loaded.keeps_rows)
        served = self._served(step, loaded.sites, loaded.dtype, loaded.keeps_rows, kept)
        return served, {**dict(loaded.model.named_buffers(remove_duplicate=False)), **kept}

    def _served(
        self,
        step: StepFunction,
        sites: tuple[Site, ...],
        dtype: torch.dtype,
        keeps_rows: bool,
        weights: Mapping[str, torch.Tensor],
    ) -> Served:
        folder = self.folder
        return Served(
            step=step,
            sites=paged_sites(sites, folder.path),
            dtype=dtype,
            device=self.device,
            keeps_rows=keeps_rows,
            end_of_sequence=folder.end_of_sequence,
            max_positions=folder.max_positions,
            vocabulary_size=int(folder.config.get("vocab_size") or 0),
            tokenizer=read_tokenizer(folder) if folder.tokenizer_file is not None else None,
            config=folder.config,
            weights_bytes=sum({t.data_ptr(): t.numel() * t.element_size() for t in weights.values()}.values()),
        )


def step_function(program: Any, keeps_rows: bool) -> StepFunction:
    """Return what an engine calls: the logits of chosen rows, picked afterwards where the model cannot choose.

    Tensors:
        ->  [...]  model
    """
    if keeps_rows:
        return lambda ids, positions, rows: program(input_ids=ids, position_ids=positions, logits_to_keep=rows)
    return lambda ids, positions, rows: program(input_ids=ids, position_ids=positions)[:, rows]


def plain_options(settings: CompileOptions) -> dict[str, Any]:
    """Return options as the plain data that `from_mapping` reads back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(settings).items()}


def unproven_artifacts(record: Record, store: KernelStore) -> tuple[str, ...]:
    """Return the keys of artifacts that were never run beside their text: these do not serve before they were."""
    found = []
    for one in with_siblings(record, store):
        for piece in one.pieces:
            for key in piece.artifacts.values():
                artifact = store.read_record(ARTIFACT, key)
                is_text = artifact["kind"] == TEXT and artifact["text"] == piece.text
                if not is_text and artifact["facts"].get("verified") not in ("drawn", "real"):
                    found.append(key)
    return tuple(found)


