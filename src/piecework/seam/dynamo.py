"""Run Dynamo once over a model and keep what it saw: graph, inputs by identity, guards, code read.

The backend only records. Compiling inside Dynamo's callback narrows symbols under its feet and ends
in a ConstraintViolationError, so nothing is compiled here.
"""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from piecework.errors import ContractError, GuardError, TraceError
from piecework.seam.contracts import CheckedRun, calls_operators
from piecework.seam.shadow import ShadowRun, shadow_run

_SETTINGS = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "specialize_float": True,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "suppress_errors": False,
    "verbose": False,
}
_FAILED = re.compile(r"""got \w*(?:Error|Exception)\((?:"|')(.*?)(?:"|')\)""", re.DOTALL)
_WHAT = re.compile(r"Developer debug context: (?:builtin |call_function )?([^\n\[]{1,80})")
_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class DimMark:
    """How one dimension of one example tensor is traced: `backed`, `oblivious` or `unbacked`."""

    tensor: torch.Tensor
    dim: int
    name: str
    kind: str


@dataclass(frozen=True)
class GuardNote:
    """A guard that Dynamo would have installed, with the user's line where it is known."""

    kind: str
    source: str
    value: Any
    line: str


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


def capture(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], marks: Sequence[DimMark]
) -> tuple[Capture, Any]:
    """Trace `model(*args, **kwargs)` to one full graph without compiling; return the capture and the result.

    The result's tensors and integers are marked: each is a distinct object that stands in
    `capture.results` too, so that a leaf of the result names the graph output that it is.

    Sizes are traced oblivious of 0 and 1: torch takes no size for 1 by itself, so where the model asks whether
    one is 1, its question stands among the guards. What does not trace so is traced with sizes from 2 on
    (`capture.is_oblivious` is false then).
    """
    has_choice = not any(mark.kind == "oblivious" for mark in marks) and any(mark.kind == "backed" for mark in marks)
    found: tuple[Capture, Any] | None = None
    try:
        found = _capture(model, args, kwargs, marks, oblivious=True)
        if not has_choice or not _unknown_sizes(found[0]):
            return found
        plain = _capture(model, args, kwargs, marks, oblivious=False)
    except ContractError:
        raise
    except TraceError:
        if found is not None:
            return found
        if not has_choice:
            raise
        return _capture(model, args, kwargs, marks, oblivious=False)
    return plain if _unknown_sizes(plain[0]) < _unknown_sizes(found[0]) else found


def _unknown_sizes(captured: Capture) -> int:
    """Count the sizes that a graph learns at run time only."""
    return sum(len(node.meta.get("unbacked_bindings") or ()) for node in captured.graph.graph.nodes)


def _capture(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], marks: Sequence[DimMark], *, oblivious: bool
) -> tuple[Capture, Any]:
    import torch._dynamo
    from torch._subclasses import FakeTensor

    found: list[Capture] = []
    guards: list[GuardNote] = []

    def record(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.get()
        kept = Capture(graph, list(inputs), code=list(getattr(context, "traced_code", [])))
        found.append(kept)

        kept.is_checked = calls_operators(graph.graph) and not any(isinstance(v, FakeTensor) for v in inputs)

        def run_graph(*values: Any) -> tuple[Any, ...]:
            outputs = shadow_run(graph, values, CheckedRun if kept.is_checked else ShadowRun)
            kept.results = [_mark(value, index) for index, value in enumerate(outputs)]
            return tuple(kept.results)

        return run_graph

    def drop_guards(entries: Sequence[Any]) -> list[bool]:
        guards.extend(_note(entry) for entry in entries)
        return [False] * len(entries)

    entry = _fresh_entry()
    compiled = torch.compile(entry, backend=record, fullgraph=True, options={"guard_filter_fn": drop_guards})

    def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with torch.no_grad(), _settings(oblivious):
            return compiled(model, args, kwargs)

    _apply(marks)
    try:
        result = run(args, kwargs)
    except ContractError:
        raise
    except Exception as error:
        raise _explain(error) from error
    if not found:
        raise TraceError(
            "the model holds no tensor operation, so there is nothing to compile",
            hint="call it as it is; a program needs at least one operation",
        )
    found[0].guards = guards
    found[0].is_oblivious = oblivious
    found[0].run = run
    return found[0], result


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


def _note(entry: Any) -> GuardNote:
    stack = getattr(entry.orig_guard, "user_stack", None)
    line = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return GuardNote(entry.guard_type, entry.orig_guard.name, entry.value if entry.has_value else None, line)


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


_LOGGERS = ("torch._subclasses.fake_tensor", "torch._guards")

_HINTS = (
    (
        r"builtin operator `print`",
        "take the print out of forward, or put it under `if not torch.compiler.is_compiling()`",
    ),
    (r"[Dd]ata-dependent", "use torch.where, or make the branch an opaque operator of your own"),
    (r"builtin|C/C\+\+", "use a tensor operation instead, or put the call into an opaque operator"),
    (r"generator", "use a tensor operation instead, or put the call into an opaque operator"),
)


def _explain(error: Exception) -> TraceError | GuardError:
    """Turn Dynamo's error into ours, with the user's last line and a hint."""
    text = str(error)
    frames = [frame for frame in _USER_FRAME.findall(text) if "site-packages/torch/" not in frame[0]]
    place = f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    failed = _FAILED.search(text)
    if (what := _WHAT.search(text)) is not None and failed is None:
        first = f"{first} (`{what[1].strip()}`)"
    if failed is not None:
        first = failed[1]
    facts = {"file": frames[-1][0] if frames else "", "line": int(frames[-1][1]) if frames else 0, "report": text}
    if "ConstraintViolation" in type(error).__name__:
        return GuardError(
            f"a dimension declared dynamic is fixed by the model{' at ' + place if place else ''}: {_reason(text)}",
            hint="leave it out of `dynamic`, or change the line so that every size is possible",
            facts=facts,
        )
    is_unsupported = type(error).__name__ in ("Unsupported", "UserError") and "Observed exception" not in first
    if failed is not None or not is_unsupported:
        facts["fails"] = True
        hint = "call the model uncompiled with inputs of these sizes to see it fail; mend it, or bound the dimension"
        return TraceError(f"forward fails{' at ' + place if place else ''}: {first}", hint=hint, facts=facts)
    advice = "rewrite the line as tensor operations, or put it into an opaque operator"
    hint = next((hint for words, hint in _HINTS if re.search(words, text)), advice)
    return TraceError(
        f"the model does not trace to one full graph{' at ' + place if place else ''}: {first}", hint=hint, facts=facts
    )


def _reason(text: str) -> str:
    lines = [line.strip(" -") for line in text.splitlines() if line.strip().startswith("-")]
    return lines[0] if lines else text.splitlines()[0]
