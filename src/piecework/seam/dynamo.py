"""Run Dynamo once over a model and keep what it saw: graph, inputs by identity, guards, code read.

The backend only records. Compiling inside Dynamo's callback narrows symbols under its feet and ends
in a ConstraintViolationError, so nothing is compiled here.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from piecework.errors import ContractError, TraceError
from piecework.seam.contracts import CheckedRun, calls_operators
from piecework.seam.guard_notes import GuardNote, all_notes, notes_of
from piecework.seam.number_functions import teach_tracer
from piecework.seam.shadow import ShadowRun, shadow_run
from piecework.seam.torch_phases import observe_torch
from piecework.seam.trace_failures import explain
from piecework.seam.writes import Writes, find_writes, refuse, source_of
from piecework.span_events import sub_phase
from piecework.values.arguments import LeafDims

_SETTINGS = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "specialize_float": True,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "suppress_errors": False,
    "verbose": False,
}
_LOGGERS = ("torch._subclasses.fake_tensor", "torch._guards")


@dataclass(frozen=True)
class DimMark:
    """How one dimension of one example tensor is traced: `backed`, `oblivious` or `unbacked`."""

    tensor: torch.Tensor
    dim: int
    name: str
    kind: str
    path: str = ""


class OutputInt(int):
    """An integer that is the graph's output number `position`; equal to that integer in all else."""

    position: int

    @classmethod
    def mark(cls, value: int, position: int) -> OutputInt:
        marked = cls(value)
        marked.position = position
        return marked


@dataclass
class Capture:
    """What one run of Dynamo gave; `results` are the marked outputs of the latest run of the graph."""

    graph: fx.GraphModule
    inputs: list[Any]
    results: list[Any] = field(default_factory=list)
    guards: list[GuardNote] = field(default_factory=list)
    code: list[types.CodeType] = field(default_factory=list)
    run: Callable[[Sequence[Any], Mapping[str, Any]], Any] = lambda args, kwargs: None
    is_oblivious: bool = False
    is_checked: bool = False
    writes: Writes = Writes()
    sources: Sequence[str] = ()  # where each input is read, in Dynamo's words
    instead: Callable[[], Any] | None = None  # what a later run of the graph comes to, where that is another thing


def marks_for(inputs: Sequence[tuple[str, Any]], dims: Sequence[LeafDims]) -> list[DimMark]:
    """Return how each dynamic dimension of the inputs, given by their paths, is traced."""
    tensors = dict(inputs)
    return [
        DimMark(tensors[leaf.path], dim, mark.name, mark.kind, leaf.path)
        for leaf in dims
        for dim, mark in leaf.dims.items()
    ]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    marks: Sequence[DimMark],
    *,
    keeps_shape_guards: bool = False,
) -> tuple[Capture, Any]:
    """Trace `model(*args, **kwargs)` to one full graph without compiling; return the capture and the result.

    The result's tensors and integers are marked: each is a distinct object that stands in
    `capture.results` too, so that a leaf of the result names the graph output that it is.

    Sizes are traced oblivious of 0 and 1: torch takes no size for 1 by itself, so where the model asks whether
    one is 1, its question stands among the guards. What does not trace so is traced with sizes from 2 on
    (`capture.is_oblivious` is false then). With `keeps_shape_guards`, a later `run` evaluates those, as torch does.
    """

    def attempt(*, oblivious: bool) -> tuple[Capture, Any]:
        return _capture(model, args, kwargs, marks, oblivious=oblivious, kept=("SHAPE_ENV",) * keeps_shape_guards)

    has_choice = not any(mark.kind == "oblivious" for mark in marks) and any(mark.kind == "backed" for mark in marks)
    found: tuple[Capture, Any] | None = None
    try:
        found = attempt(oblivious=True)
        if not has_choice or not _unknown_sizes(found[0]):
            return found
        plain = attempt(oblivious=False)
    except ContractError:
        raise
    except TraceError:
        if found is not None:
            return found
        if not has_choice:
            raise
        return attempt(oblivious=False)
    return plain if _unknown_sizes(plain[0]) < _unknown_sizes(found[0]) else found


def _unknown_sizes(captured: Capture) -> int:
    """Count the sizes that a graph learns at run time only."""
    return sum(len(node.meta.get("unbacked_bindings") or ()) for node in captured.graph.graph.nodes)


def _capture(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    marks: Sequence[DimMark],
    *,
    oblivious: bool,
    kept: Sequence[str],
) -> tuple[Capture, Any]:
    import torch._dynamo

    teach_tracer()
    found: list[Capture] = []
    guards: list[GuardNote] = []

    def record(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made = _started(graph, inputs)
        found.append(made)

        def run_graph(*values: Any) -> tuple[Any, ...]:
            refuse(made.writes.lost)  # before Dynamo makes the writes that it noted
            if found[0].instead is not None:
                return found[0].instead()  # type: ignore[no-any-return]
            outputs = shadow_run(graph, values, CheckedRun if made.is_checked else ShadowRun)
            made.results = [_mark(value, index) for index, value in enumerate(outputs)]
            return tuple(made.results)

        return run_graph

    def drop_guards(entries: Sequence[Any]) -> list[bool]:
        guards.extend(note for entry in entries for note in notes_of(entry))
        return [entry.guard_type in kept for entry in entries]

    entry = _fresh_entry()
    compiled = torch.compile(entry, backend=record, fullgraph=True, options={"guard_filter_fn": drop_guards})

    def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with torch.no_grad(), _settings(oblivious):
            observe_torch()
            return compiled(model, args, kwargs)

    _apply(marks)
    try:
        with sub_phase("Dynamo", "sizes of any kind" if oblivious else "sizes from 2 on"):
            result = run(args, kwargs)
    except (ContractError, TraceError):
        raise
    except Exception as error:
        raise explain(error, marks) from error
    if not found:
        raise TraceError(
            "the model holds no tensor operation, so there is nothing to compile",
            hint="call it as it is; a program needs at least one operation",
        )
    found[0].guards = all_notes(guards, found[0].sources)
    found[0].is_oblivious = oblivious
    found[0].run = run
    return found[0], result


def _started(graph: fx.GraphModule, inputs: Sequence[Any]) -> Capture:
    """Return a capture of what the trace that runs now has found."""
    from torch._subclasses import FakeTensor

    return Capture(
        graph,
        list(inputs),
        code=list(getattr(torch._guards.TracingContext.get(), "traced_code", [])),
        writes=find_writes(graph.graph),
        sources=[source_of(node) for node in graph.graph.find_nodes(op="placeholder")],
        is_checked=calls_operators(graph.graph) and not any(isinstance(value, FakeTensor) for value in inputs),
    )


def check_again(captured: Capture, arguments: Mapping[str, Any]) -> None:
    """Run a capture's operators at other sizes too, for those that keep their contract at some sizes only."""
    if captured.is_checked:
        try:
            captured.run((), arguments)
        except ContractError:
            raise
        except Exception:  # noqa: BLE001  # the inputs' values may agree with their own sizes alone
            return


def release(captured: Capture) -> None:
    """Forget what Dynamo keeps for a capture; its graph stays usable."""
    captured.run = lambda args, kwargs: None
    captured.results = []


def _fresh_entry() -> Callable[..., Any]:
    """Make a function with a code object of its own: Dynamo's caches and limits are kept per code object."""

    def piecework_entry(model: Any, args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(piecework_entry.__code__.replace(), globals(), "piecework_entry")


def _mark(value: Any, position: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.view_as(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return OutputInt.mark(value, position)
    return value


def _apply(marks: Sequence[DimMark]) -> None:
    for mark in marks:
        if mark.kind == "unbacked":
            torch._dynamo.decorators.mark_unbacked(mark.tensor, mark.dim, shape_id=mark.name)
        else:
            torch._dynamo.mark_dynamic(mark.tensor, mark.dim)


@contextmanager
def _settings(oblivious: bool) -> Iterator[None]:
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes_config

    shapes: Any = shapes_config

    ours = {name: value for name, value in _SETTINGS.items() if hasattr(dynamo, name)}
    symbols = {"use_duck_shape": False} | ({"backed_size_oblivious": True} if oblivious else {})
    with ExitStack() as stack:
        stack.enter_context(_without_tracebacks())
        stack.enter_context(dynamo.patch(ours))
        stack.enter_context(shapes.patch({name: v for name, v in symbols.items() if hasattr(shapes, name)}))
        yield


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging the traceback of what fails: it is raised as an error of ours, with the user's line."""

    def passes(entry: logging.LogRecord) -> bool:
        return entry.levelno < logging.ERROR

    loggers = [log for name in _LOGGERS if not (log := logging.getLogger(name)).isEnabledFor(logging.INFO)]
    for log in loggers:
        log.addFilter(passes)
    try:
        yield
    finally:
        for log in loggers:
            log.removeFilter(passes)
