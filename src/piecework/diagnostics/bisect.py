"""Bisect: where between the model and its program the first wrong number is made.

The model runs as it is; its graph runs as text; each site's pieces run beside their texts as functional graphs and as
they were compiled; the program runs whole. The first of these that differs is the stage at fault, and where pieces
differ, the first tensor of the first site, and the call inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piecework.api.live import refuse_direct
from piecework.api.programs import make_request
from piecework.api.stores import default_store, report_to_log
from piecework.compilers.aot_eager import AotEagerCompiler
from piecework.diagnostics.captured_form import MakeDevice, device_like
from piecework.diagnostics.inside import REPLAY, Inside, line_of, look_inside
from piecework.diagnostics.lockstep import Divergence, Lockstep, made_form, stored_form
from piecework.diagnostics.reproduce import write_reproduction
from piecework.errors import OptionError
from piecework.events import Observer
from piecework.options import NONE, STOCK, CompileOptions
from piecework.pipeline import Request, compile_model
from piecework.runtime.program import Program
from piecework.seam.operators import resolve_bodies
from piecework.stages.find import read_program, with_siblings
from piecework.store.protocol import KernelStore
from piecework.values.artifact import Compiler
from piecework.values.attributes import plain_tensors
from piecework.values.declaration import Dynamic
from piecework.values.difference import Difference, compare, copy_of
from piecework.values.shapes import format_box
from piecework.values.tolerance import FACTOR, allowed_error
from piecework.values.tree import leaves

EQUAL, TRACE, AOT, COMPILE, BIND, CAPTURE = "equal", "trace", "aot", "compile", "bind", "capture"
_STAGES = {"aot": AOT, "compiled": COMPILE}
Call = Callable[..., Any]


@dataclass(frozen=True)
class Finding:
    """The stage at fault (`equal` if none is), and for a piece where in it.

    `region` and `piece` say which site, `tensor` which result of the piece differs first, `inside` which call makes it
    wrong; `folder` holds what reproduces it alone. `result` is the difference of the whole program's result.
    """

    stage: str
    difference: Difference | None = None
    region: int = -1
    piece: int = -1
    box: str = ""
    tensor: str = ""
    inside: Inside | None = None
    folder: Path | None = None
    result: Difference | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)
    eager_error: float = 0.0

    @property
    def is_equal(self) -> bool:
        return self.stage == EQUAL


def bisect(
    model: torch.nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    dynamic: Dynamic | None = None,
    options: CompileOptions | None = None,
    store: KernelStore | None = None,
    ops: Mapping[str, Callable[..., Any]] | None = None,
    observer: Observer | None = None,
    compiler: Compiler | None = None,
    make_device: MakeDevice | None = None,
    folder: Path | None = None,
) -> Finding:
    """Compile a model for `inputs`, or find it compiled, and find where its program first differs from it.

    The arguments are those of `pw.compile`; `compiler` is what made the artifacts, where that is none of ours, and
    `make_device` makes what records graphs, where that is neither the GPU nor the dry device, and `folder` is where a
    piece that is wrong is written with what reproduces it.
    """
    settings = (options or CompileOptions()).resolve()
    if settings.mode in (NONE, STOCK):
        raise OptionError(
            f"mode `{settings.mode}` has no stages to compare", hint="bisect in mode piecewise or trace_once"
        )
    watch = observer or report_to_log
    kept = store if store is not None else default_store(watch, strict=settings.strict)
    request = make_request(model, inputs, dynamic, settings)
    refuse_direct(settings.keyed(), "what is bisected")
    if compiler is not None:
        request = _with_compiler(request, compiler)
    tensors: dict[str, Tensor] = dict(plain_tensors(model, Tensor))
    tensors |= {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    program = compile_model(request, lambda: tensors, ops or {}, kept, watch, model=model)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    search = Search(program, kept, request.compiler, ops or {}, make_device)

    def run(call: Call) -> Any:
        with torch.no_grad():
            return call(*_own(args), **_own(kwargs))

    return search.find(lambda: run(model), run, folder)


def _with_compiler(request: Request, compiler: Compiler) -> Request:
    factors = {
        **request.factors,
        "compiler": {**request.factors["compiler"], "name": compiler.name, "version": compiler.version},
    }
    return replace(request, compiler=compiler, factors=factors)


class Search:
    """Compares the stages of one bound program."""

    def __init__(
        self,
        program: Program,
        store: KernelStore,
        compiler: Compiler,
        bodies: Mapping[str, Callable[..., Any]],
        make_device: MakeDevice | None = None,
    ) -> None:
        self._program, self._store, self._compiler = program, store, compiler
        self._steps: list[Lockstep] = []
        records = with_siblings(read_program(program.key, store), store)
        for record in reversed(records):
            make = make_device or device_like(record.device)
            forms = [made_form("aot", AotEagerCompiler()), stored_form(record, store), stored_form(record, store, make)]
            following = self._steps[0] if self._steps else None
            bound = resolve_bodies(record, bodies)
            self._steps.insert(0, Lockstep(record, store, program.weights, bound, forms, following))
        self.modules = sorted({module for record in records for module in record.operators.values() if module})

    def find(self, eager: Callable[[], Any], run: Callable[[Call], Any], folder: Path | None = None) -> Finding:
        """Compare the stages on one step: `eager` runs the model, `run` calls a program on the same inputs.

        A program that raises for what a wrong piece gave it is a difference too; where no piece is wrong, so is raised.
        """
        expected = eager()
        text = run(self._steps[0])
        failure: Exception | None = None
        try:
            whole = run(self._program)
        except Exception as error:  # noqa: BLE001  an opaque body may raise anything
            failure, whole = error, text
        errors = sum(step.eager_error for step in self._steps)
        shared: dict[str, Any] = {
            "skipped": dict(self._steps[0].skipped),
            "calls": {name: sum(step.calls[name] for step in self._steps) for name in self._steps[0].calls},
            "eager_error": errors,
            "result": _worst(whole, expected, errors) if failure is None else _raises(failure),
        }
        traced = _worst(text, expected, 0.0)
        if traced is not None and traced.is_fault:
            return Finding(TRACE, traced, tensor=traced.name, **shared)
        first = self._steps[0].first
        for form, stage in _STAGES.items():
            if form in first:
                return self._explain(first[form], stage, folder, shared)
        if failure is not None:
            raise failure
        bound = _worst(whole, text, errors)
        if bound is not None and bound.is_fault:
            return Finding(BIND, bound, tensor=bound.name, **shared)
        if "captured" in first:
            return self._explain(first["captured"], CAPTURE, folder, shared)
        return Finding(EQUAL, **shared)

    def _explain(self, found: Divergence, stage: str, folder: Path | None, shared: dict[str, Any]) -> Finding:
        place, name = found.place, found.difference.name
        compiler: Compiler = AotEagerCompiler() if stage == AOT else self._compiler
        if stage == CAPTURE:  # the piece is right uncaptured: the fault is in what is replayed
            plain = name.partition(" ")[0]
            inside = Inside(plain, line_of(place.text, plain), REPLAY)
        else:
            inside = look_inside(place.text, place.box, found.values, name, compiler, self._store)
        box = format_box(place.box)
        script = None
        if folder is not None:
            notes = {
                "stage": stage, "region": place.region, "piece": place.piece, "box": box, "tensor": name,
                "value": inside.value, "line": inside.line, "origin": inside.origin, "fault": found.difference.fault,
            }  # fmt: skip
            script = write_reproduction(folder, place.text, found.artifact, found.values, notes, self.modules)
        return Finding(
            stage, found.difference, place.region, place.piece, box, name, inside,
            None if script is None else script.parent, **shared,
        )  # fmt: skip


def _raises(error: Exception) -> Difference:
    said = (str(error).strip().splitlines() or [""])[0]
    return Difference("result", math.inf, 0.0, math.inf, f"the program raises `{type(error).__name__}: {said}`")


def _own(value: Any) -> Any:
    """Return arguments that a run may write to."""
    if isinstance(value, Tensor):
        return copy_of(value)
    if isinstance(value, Mapping):
        return {name: _own(inner) for name, inner in value.items()}
    return type(value)(map(_own, value)) if type(value) in (tuple, list) else value


def _worst(got: Any, expected: Any, eager_error: float) -> Difference | None:
    """Compare two results leaf by leaf; an error may be what eager's own errors on the way sum up to, by the rule."""
    found: list[Difference] = []
    for (name, one), (_, two) in zip(leaves(got, "result"), leaves(expected, "result"), strict=True):
        if isinstance(two, Tensor):
            each = compare(name, one, two)
            dtype = str(two.dtype).removeprefix("torch.")
            if each.error <= max(each.allowed, allowed_error(FACTOR * eager_error, dtype)):
                each = Difference(name, each.error, each.allowed, each.ulps, "", each.is_compared)
            found.append(each)
        elif one != two:
            found.append(Difference(name, float("inf"), 0.0, float("inf"), f"`{name}` is `{one}`, in eager `{two}`"))
    return max(found, key=lambda each: (each.is_fault, each.error), default=None)
