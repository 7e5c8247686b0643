"""The straight line: a model goes in, a program comes out; cold and warm starts meet in `bind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecework.events import Observer, SplitDone, phase
from piecework.runtime.program import Program
from piecework.seam.operators import resolve_bodies
from piecework.stages.bind import bind
from piecework.stages.evidence import collect, why_stale
from piecework.stages.find import find_record, require_modules
from piecework.stages.load import load_artifacts
from piecework.stages.record import read_constants
from piecework.store.protocol import PROGRAM, KernelStore
from piecework.values.artifact import Compiler
from piecework.values.declaration import Dynamic
from piecework.values.digest import digest_data
from piecework.values.graph import OPAQUE, PIECE
from piecework.values.key import key_of
from piecework.values.record import Record
from piecework.values.shapes import Range, boxes_of, combinations, symbol_ranges


# Is shown each value between two stages by its name, and gives the value to go on with.
Witness = Callable[[str, Any], Any]


def pass_on(name: str, value: Any) -> Any:
    """Go on with the value as it is."""
    return value


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


@dataclass(frozen=True)
class Request:
    """What is to be compiled, in plain values; `factors` name the program, `ranges` cut the first symbol's sizes."""

    factors: Mapping[str, Any]
    make_source: Callable[[], Source]
    ranges: tuple[Range, ...]
    split_ops: tuple[str, ...]
    split_ops_only: tuple[str, ...] | None
    merge_consecutive: bool
    compiler: Compiler
    fall_back: Compiler
    toolchain: Mapping[str, str]
    budget_s: float = 0.0
    debug_folder: str = ""
    witness: Witness = pass_on


def compile_model(
    request: Request,
    weights: Callable[[Record], Mapping[str, torch.Tensor]],
    bodies: Mapping[str, Callable[..., Any]],
    store: KernelStore,
    observer: Observer,
    *,
    model: torch.nn.Module | None = None,
) -> Program:
    """Return the program of a request: found in the store, or traced, cut and compiled into it."""
    key, record = find_or_build(request, store, observer, model=model)
    return bind_record(key, record, weights(record), bodies, store, observer)


def find_or_build(
    request: Request, store: KernelStore, observer: Observer, *, model: torch.nn.Module | None = None
) -> tuple[str, Record]:
    """Return the record of a request and its key: the first in the store that nothing made stale, else a new one."""
    found = find_record(
        request.factors, store, observer, lambda r: why_stale(r.sources, lambda: store.read_blob(r.evidence), model)
    )
    return found or build(request, store, observer)


def build(request: Request, store: KernelStore, observer: Observer) -> tuple[str, Record]:
    """Trace, cut and compile a model into the store; return its record's key and the record. Nothing is run."""
    from piecework.stages.compile import Job, compile_jobs
    from piecework.stages.graph_text import leave_graph
    from piecework.stages.record import make_record
    from piecework.stages.split import resolve_split_ops, split
    from piecework.stages.trace import trace
    from piecework.stages.unique import unique

    with phase(observer, "model"):
        source = request.make_source()
    with phase(observer, "trace"):
        traced = request.witness("traced", trace(source.model, source.example, source.dynamic, device=source.device))
    with phase(observer, "split"):
        wanted = resolve_split_ops(request.split_ops, request.split_ops_only)
        cut = request.witness("split", split(traced, wanted, merge_consecutive=request.merge_consecutive))
    with phase(observer, "unique"):
        plan = request.witness("plan", unique(cut))
    ranges = symbol_ranges(traced.symbols, request.ranges)
    boxes = boxes_of(plan.regions, combinations(ranges))
    jobs = [Job(n, text, name, box) for n, text in enumerate(plan.pieces) for name, box in boxes[n].items()]
    observer(
        SplitDone(
            regions=len(plan.regions),
            opaque=plan.count(OPAQUE),
            sites=plan.count(PIECE),
            distinct=len(plan.pieces),
            artifacts=len(jobs),
        )
    )
    with phase(observer, "compile", f"{len(jobs)} artifacts"):
        artifacts = compile_jobs(
            jobs, request.compiler, request.fall_back, request.toolchain, store, observer, budget_s=request.budget_s
        )
    evidence = collect(traced.guards, traced.code)
    record = make_record(traced, plan, request.factors, ranges, artifacts, evidence, source, store)
    key = f"{key_of(request.factors)}.{digest_data(record.as_dict())}"
    store.write_record(PROGRAM, key, record.as_dict())
    leave_graph(key, record, plan.pieces, store, request.debug_folder, observer)
    return key, record


def bind_record(
    key: str,
    record: Record,
    weights: Mapping[str, torch.Tensor],
    bodies: Mapping[str, Callable[..., Any]],
    store: KernelStore,
    observer: Observer,
) -> Program:
    """Load a record's artifacts and bind them to weights and opaque bodies."""
    require_modules(record)
    wanted = {(n, box): artifact for n, piece in enumerate(record.pieces) for box, artifact in piece.artifacts.items()}
    with phase(observer, "load", f"{len(set(wanted.values()))} artifacts"):
        loaded = load_artifacts(wanted, store, observer)
        constants = read_constants(store.read_blob(record.constants))
    with phase(observer, "bind"):
        return bind(record, loaded, {**constants, **weights}, resolve_bodies(record, bodies), key=key)
