"""The straight line: a model goes in, a program comes out; cold and warm starts meet in `bind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from piecework.errors import ArtifactMissing
from piecework.events import Observer, RecordMiss, SplitDone, phase
from piecework.runtime.lazy_sizes import OnDemand
from piecework.runtime.program import Program
from piecework.seam.operators import resolve_bodies
from piecework.stages.bind import bind
from piecework.stages.evidence import collect, what_changed, why_stale
from piecework.stages.find import deserves_more, find_record, moved, require_modules, with_siblings
from piecework.stages.load import load_artifacts
from piecework.stages.record import read_constants
from piecework.store.protocol import PROGRAM, KernelStore
from piecework.values.arguments import bind_arguments, dynamic_leaves, symbol_sources
from piecework.values.artifact import Compiler, keeping_apart, preparing
from piecework.values.declaration import Dynamic
from piecework.values.graph import OPAQUE, PIECE, Plan, SymbolSource, TracedGraph
from piecework.values.key import factors_of_side, key_of, program_key
from piecework.values.record import Record
from piecework.values.rewriting import GraphPass
from piecework.values.shapes import Range, boxes_of, clip, combinations, format_box, hull, symbol_ranges
from piecework.values.verdict import Check, let_pass

if TYPE_CHECKING:
    from piecework.stages.audit import Side

Result = TypeVar("Result")
# Is shown each value between two stages by its name, and gives the value to go on with.
Witness = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Source:
    """A model to trace, made on a cold start alone: its example inputs, its dynamic dimensions, and what a
    warm start must know of it (`weight_rules`: how weights are made of files; `notes`: plain data)."""

    model: torch.nn.Module
    example: Sequence[Any] | Mapping[str, Any]
    dynamic: Dynamic
    device: str = "cpu"
    weight_rules: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def symbols(self) -> tuple[SymbolSource, ...]:
        """Return the sizes that vary, by name."""
        return symbol_sources(dynamic_leaves(bind_arguments(self.model.forward, self.example), self.dynamic))


@dataclass(frozen=True)
class Request:
    """What is to be compiled, in plain values; `factors` name the program, `ranges` cut the first symbol's sizes.

    `environment` holds what changes code, `cpp_compiler` what builds kernels for a CPU, if any.
    """

    factors: Mapping[str, Any]
    make_source: Callable[[], Source]
    ranges: tuple[Range, ...]
    split_ops: tuple[str, ...]
    split_ops_only: tuple[str, ...] | None
    merge_consecutive: bool
    partition: str
    split_at_guards: bool
    evaluate_guards: bool
    compiler: Compiler
    fall_back: Compiler
    toolchain: Mapping[str, str]
    passes: tuple[GraphPass, ...] = ()
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cpp_compiler: str = ""
    budget_s: float = 0.0
    threads: int = 1
    verify: bool = False
    debug_folder: str = ""
    witness: Witness = lambda name, value: value


def compile_model(
    request: Request,
    weights: Callable[[], Mapping[str, torch.Tensor]],
    bodies: Mapping[str, Callable[..., Any]],
    store: KernelStore,
    observer: Observer,
    *,
    model: torch.nn.Module | None = None,
    on_demand: OnDemand | None = None,
) -> Program:
    """Return the program of a request: found in the store, or traced, cut and compiled into it."""
    return start_from(
        request,
        lambda key, record: bind_record(
            key, record, weights, bodies, store, observer, model=model, on_demand=on_demand
        ),
        store,
        observer,
        model=model,
    )


def start_from(
    request: Request,
    finish: Callable[[str, Record], Result],
    store: KernelStore,
    observer: Observer,
    *,
    model: torch.nn.Module | None = None,
) -> Result:
    """Return what `finish` makes of a request's record; where something it reads is damaged or gone, build it anew."""
    key, record = find_or_build(request, store, observer, model=model)
    try:
        return finish(key, record)
    except ArtifactMissing as error:
        observer(RecordMiss(lookup=key.partition(".")[0], reason=error.message))
        return finish(*build(request, store, observer))


def find_or_build(
    request: Request, store: KernelStore, observer: Observer, *, model: torch.nn.Module | None = None
) -> tuple[str, Record]:
    """Return the record of a request and its key: the first in the store that nothing made stale, else a new one."""
    group = key_of(request.factors)
    known = set(store.list_records(PROGRAM, group))  # before the look: what comes while it is taken is news
    if (found := find(request, store, observer, model=model)) is not None:
        return found
    with store.single_flight(f"program-{group}", lambda: set(store.list_records(PROGRAM, group)) > known) as flight:
        if not flight.owned:
            found = find(request, store, observer, model=model)
        return found or build(request, store, observer)


def find(
    request: Request, store: KernelStore, observer: Observer, *, model: torch.nn.Module | None = None
) -> tuple[str, Record] | None:
    """Return the first record of a request in the store that nothing made stale, and its key; None if there is none."""

    def stale(record: Record) -> str:
        found = (
            deserves_more(one, request.budget_s, request.verify)
            or moved(one, request.cpp_compiler)
            or why_stale(one.sources, lambda one=one: store.read_blob(one.evidence), model)  # type: ignore[misc]
            for one in with_siblings(record, store)
        )
        return next((reason for reason in found if reason), "")

    return find_record(request.factors, store, observer, stale)


def build(request: Request, store: KernelStore, observer: Observer) -> tuple[str, Record]:
    """Trace, cut and compile a model into the store; return its record's key and the record.

    Nothing is run but new artifacts, each beside its text. Where the model branches on sizes there are several traces,
    each with a record; the first names the others.
    """
    from piecework.stages.audit import trace_sides, unproven
    from piecework.stages.split import resolve_split_ops
    from piecework.stages.trace import trace

    with phase(observer, "model"):
        source = request.make_source()
    # Before the trace: an unknown name is told at once, and what a trace declares comes too late.
    split_ops = resolve_split_ops(request.split_ops, request.split_ops_only)
    ranges = symbol_ranges(source.symbols(), request.ranges)
    is_first = bool(request.cpp_compiler) and not store.list_records(PROGRAM, key_of(request.factors))
    with preparing(request.compiler, observer, when=is_first):
        with phase(observer, "trace"):
            attempt = partial(trace, source.model, source.example, source.dynamic, device=source.device)
            sides_of = unproven if request.evaluate_guards else partial(trace_sides, may_split=request.split_at_guards)
            sides = sides_of(lambda bounds: attempt(bounds=bounds), hull(ranges))
        further = [_build_side(request, source, ranges, split_ops, side, (), store, observer)[0] for side in sides[1:]]
        return _build_side(request, source, ranges, split_ops, sides[0], further, store, observer)


def _build_side(
    request: Request,
    source: Source,
    ranges: Mapping[str, tuple[Range, ...]],
    split_ops: frozenset[str],
    side: Side,
    siblings: Sequence[str],
    store: KernelStore,
    observer: Observer,
) -> tuple[str, Record]:
    from piecework.stages.compile import Job, compile_jobs
    from piecework.stages.graph_text import leave_graph
    from piecework.stages.notes import collectives_in, notes_of, tell_cuts
    from piecework.stages.record import make_record
    from piecework.stages.rewrite import naming_cuts, rewrite
    from piecework.stages.split import split
    from piecework.stages.unique import unique
    from piecework.values.narrow import assign, refine

    traced, bounds = request.witness("traced", side.traced), hull(ranges)
    traced = replace(traced, split_ops=split_ops)
    with phase(observer, "passes"):
        traced, reports = rewrite(traced, request.passes, request.compiler, observer, request.witness)
    with phase(observer, "split"):
        cut = split(traced, split_ops, merge_consecutive=request.merge_consecutive, partition=request.partition)
    cut = request.witness("split", cut)
    with phase(observer, "unique"):
        plan = request.witness("plan", unique(cut))
    own = clip(ranges, side.bounds)
    boxes = boxes_of(plan.regions, combinations(own))
    jobs = [Job(n, text, name, box) for n, text in enumerate(plan.pieces) for name, box in boxes[n].items()]
    counts = {"opaque": plan.count(OPAQUE), "sites": plan.count(PIECE), "distinct": len(plan.pieces)}
    observer(SplitDone(regions=len(plan.regions), artifacts=len(jobs), **counts))
    check, threads = _check(request, source, traced, plan, store)
    with phase(observer, "compile", f"{len(jobs)} artifacts"), naming_cuts(plan):
        parts = compile_jobs(
            jobs, keeping_apart(request.compiler, plan.inside), request.fall_back, request.toolchain, store, observer,
            environment=request.environment, cpp_compiler=request.cpp_compiler, budget_s=request.budget_s,
            threads=threads, check=check,
        )  # fmt: skip
        own = refine(own, plan.regions, parts)
        artifacts = assign(own, plan.regions, parts)
        tell_cuts(artifacts, plan, store, observer)
    with phase(observer, "record"):
        evidence = collect(traced.guards, traced.code, traced.constants, source.model)
        factors = factors_of_side(request.factors, "" if side.bounds == bounds else format_box(side.bounds), siblings)
        notes = notes_of(artifacts, store, check) | ({"passes": reports} if reports else {})
        notes |= {"collectives": found} if (found := collectives_in(traced.graph)) else {}
        record = make_record(
            traced, plan, factors, own, artifacts, evidence, replace(source, notes={**source.notes, **notes}), store,
            proofs=side.proofs, bounds=bounds, siblings=siblings, cpp_compiler=request.cpp_compiler,
        )  # fmt: skip
        key = program_key(factors, record.as_dict())
        store.write_record(PROGRAM, key, record.as_dict())
        leave_graph(key, record, plan.pieces, store, request.debug_folder, observer)
    return key, record


def _check(request: Request, source: Source, traced: TracedGraph, plan: Plan, store: KernelStore) -> tuple[Check, int]:
    """Return what runs each new artifact beside its text, and how many are compiled at once: one if it fills a GPU."""
    if not request.verify:
        return let_pass, request.threads
    from piecework.stages.verify import Verification, draws_on_gpu, own_weights

    check = Verification(store.kernel_path, own_weights(source.model, source.device, plan, traced.constants))
    return check, 1 if draws_on_gpu(source.model, source.device) else request.threads


def bind_record(
    key: str,
    record: Record,
    weights: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
    bodies: Mapping[str, Callable[..., Any]],
    store: KernelStore,
    observer: Observer,
    *,
    model: torch.nn.Module | None = None,
    on_demand: OnDemand | None = None,
) -> Program:
    """Load the artifacts of a record and its siblings and bind them to weights and opaque bodies.

    `on_demand` compiles single sizes when they are met; without it nothing after this compiles.
    """
    every = list(zip((key, *record.siblings), with_siblings(record, store), strict=True))
    held = ExitStack()  # what a live process has bound is not evicted
    for own, _ in every:
        held.enter_context(store.hold(PROGRAM, own))
    for _, one in every:
        require_modules(one)
    wanted = [_wanted(one) for _, one in every]
    with phase(observer, "load", f"{len({artifact for one in wanted for artifact in one.values()})} artifacts"):
        texts = [[piece.text for piece in one.pieces] for _, one in every]
        loaded = [load_artifacts(*each, store, observer) for each in zip(wanted, texts, strict=True)]
        constants = [read_constants(store.read_blob(one.constants), one.device) for _, one in every]

    def bind_all(given: Mapping[str, torch.Tensor]) -> Program:
        program: Program | None = None
        found = given or (weights() if callable(weights) else weights)
        for (own, one), pieces, kept in reversed(list(zip(every, loaded, constants, strict=True))):
            bound = resolve_bodies(one, bodies)
            program = bind(one, pieces, {**kept, **found}, bound, key=own, elsewhere=program, on_demand=on_demand)
        assert program is not None
        return program

    with phase(observer, "bind"):
        program = bind_all({})

    def findings(live: Any) -> tuple[str, ...]:
        evidence = [(one.sources, store.read_blob(one.evidence)) for _, one in every]
        return what_changed(evidence, live if live is not None else model, program.weights)

    program.attach(rebind=bind_all, findings=findings, release=held.close, model=model)
    return program


def _wanted(record: Record) -> dict[tuple[int, str], str]:
    return {(n, box): artifact for n, piece in enumerate(record.pieces) for box, artifact in piece.artifacts.items()}
