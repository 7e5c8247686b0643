"""What can be captured: a bound program, or a model that was never traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piecework.errors import CaptureError
from piecework.runtime.explain import Checked, Leaf
from piecework.runtime.program import Program
from piecework.runtime.regions import BoundRegion, BoundResult, BoundRun, bound_run, watched_run
from piecework.values.arguments import bind_arguments, declared_dynamic, dynamic_leaves, parameters_of
from piecework.values.declaration import Dynamic, registry
from piecework.values.graph import OPAQUE
from piecework.values.shapes import Range, format_box
from piecework.values.signature import TensorSpec
from piecework.values.tree import children, containers, describe, leaves, map_leaves, render

MODEL = "model"


@dataclass(frozen=True, eq=False)
class Source:
    """Something to capture: the check of its arguments, its runs, and the operators that stand opaque in it.

    `run_for` gives the run of given sizes by symbol, `watched_for` the one that holds opaque bodies to their contract
    where there is one; `operators` map an opaque operator to its declared support. A
    program that is bound anew is another source: `now` returns it, and `rebind` binds it to its `weights` as they are.
    """

    mode: str
    leaves: Sequence[Leaf]
    checked: Checked
    runs: tuple[Callable[..., Any], ...]
    run_for: Callable[[Mapping[str, int]], BoundRun]
    operators: Mapping[str, str]
    weights: Mapping[str, Tensor]
    device: torch.device
    model: torch.nn.Module | None = None
    program: Program | None = None
    renew: Callable[[], Source] | None = None
    watched_for: Callable[[Mapping[str, int]], BoundRun] | None = None
    rebind: Callable[[], None] = lambda: None

    def now(self) -> Source:
        """Return the source as it is bound now."""
        return self if self.renew is None else self.renew()

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(self.checked.symbols)

    @property
    def largest(self) -> int:
        """The largest size that every symbol serves; 1 where nothing varies."""
        return min((ranges[-1].high for _, ranges in self.checked.symbols.values()), default=1)


def support_of(operators: Iterable[str]) -> dict[str, str]:
    """Return each opaque operator's declared capture support; what is not declared may never stand in a graph."""
    found = {}
    for name in operators:
        declared = registry.get(name.partition(".")[0])
        found[name.partition(".")[0]] = declared.capture if declared is not None else "never"
    return found


def program_source(program: Program) -> Source:
    """Return a bound program as something to capture.

    Raises CaptureError where it is several programs in one: each has a trace, and so graphs, of its own.
    """
    _refuse_several(program)
    first = program.bound
    made: list[tuple[Any, Source]] = []

    def now() -> Source:
        if not made or made[0][0] is not program.bound:
            made[:] = [(program.bound, _source_of(program, now, rebind))]
        return made[0][1]

    def rebind() -> None:
        if program.bound is not first:
            program.refresh(dict(program.weights))

    return now()


def _refuse_several(program: Program) -> None:
    if len(program.variants) > 1:
        raise CaptureError(
            f"the program has `{len(program.variants)}` variants, one for each pattern of arguments",
            hint="capture each of `program.variants` by itself",
            facts={"variants": len(program.variants)},
        )
    if len(program.sides) > 1:
        served = "; ".join(
            " or ".join(format_box(box) for box in side.bound.boxes) for side in program.sides if side.bound is not None
        )
        raise CaptureError(
            f"the model branches on sizes, so the program serves them by `{len(program.sides)}` traces: {served}",
            hint="compile a program for the sizes of one branch alone (`ranges`), and capture that one",
            facts={"sides": len(program.sides)},
        )
    if program.bound is None:
        raise CaptureError(
            f"`{program!r}` holds no regions: it is a model that was not compiled",
            hint="capture the model itself, with example inputs",
        )


def _source_of(program: Program, renew: Callable[[], Source], rebind: Callable[[], None]) -> Source:
    bound = program.bound
    assert bound is not None
    first = bound.outline(0)
    cache: dict[tuple[int, Any], BoundRun] = {}

    def run_for(sizes: Mapping[str, int], cut: Callable[..., BoundRun] = bound_run) -> BoundRun:
        for index, box in enumerate(bound.boxes):
            if all(sizes[name] in box[name] for name in sizes):
                if (index, cut) not in cache:
                    cache[index, cut] = cut(bound.runs[index], bound.outline(index))
                return cache[index, cut]
        raise CaptureError(f"no artifact of the program serves `{dict(sizes)}`", hint="capture sizes inside its ranges")

    cut = [name for region in first.regions if region.kind == OPAQUE for name in region.operators]
    operators = support_of([*cut, *first.inside])
    mode = "piecewise" if cut else "trace_once"
    return Source(
        mode, bound.leaves, bound.checked, bound.runs, run_for, operators, program.weights,
        _device_of(program.weights.values(), bound.leaves), program.model, program, renew,
        partial(run_for, cut=watched_run), rebind,
    )  # fmt: skip


def model_source(
    model: Callable[..., Any],
    example: Sequence[Any] | Mapping[str, Any],
    dynamic: Dynamic | None,
    largest: int,
    *,
    split_ops: Iterable[str] = (),
    mode: str = "none",
    module: torch.nn.Module | None = None,
) -> Source:
    """Return a model that is not compiled as something to capture; sizes up to `largest` are served."""
    owner = module if module is not None else model if isinstance(model, torch.nn.Module) else None
    forward = owner.forward if owner is not None else model
    arguments = bind_arguments(forward, example)
    dims = {leaf.path: leaf.dims for leaf in dynamic_leaves(arguments, declared_dynamic(owner, dynamic))}
    found: list[Leaf] = []
    first: dict[int, str] = {}
    for path, value in ((p, v) for name, argument in arguments.items() for p, v in leaves(argument, name)):
        spec = _spec(value, dims.get(path, {})) if isinstance(value, Tensor) else None
        same_as = first.setdefault(id(value), path) if spec is not None else path
        found.append(
            Leaf(path, f"x{len(found)}", spec, None if spec else value, "" if same_as == path else same_as, False)
        )
    symbols: dict[str, tuple[tuple[Any, ...], Sequence[Range]]] = {}
    for path, marks in dims.items():
        for dim, mark in marks.items():
            places, ranges = symbols.get(mark.name, ((), [Range(mark.low, min(mark.high or largest, largest))]))
            symbols[mark.name] = ((*places, (path, dim)), ranges)
    passed = (*symbols, *(leaf.name for leaf in found))
    checked = Checked(
        parameters=parameters_of(forward, tuple(arguments)), arguments=tuple(arguments), symbols=symbols, passed=passed,
        on_cuda=any(isinstance(leaf.spec, TensorSpec) and leaf.spec.device == "cuda" for leaf in found),
        containers=tuple(item for name, value in arguments.items() for item in containers(value, name)),
    )  # fmt: skip
    call = _Model(model, arguments, tuple(symbols), found)
    run = BoundRun(call.whole, passed, (call.region(passed),), call.result())
    weights: dict[str, Tensor] = {}
    if owner is not None:
        weights = {
            **dict(owner.named_parameters(remove_duplicate=False)),
            **dict(owner.named_buffers(remove_duplicate=False)),
        }
    operators = support_of({*registry.names(), *split_ops})
    return Source(
        mode,
        found,
        checked,
        (call.whole,),
        lambda sizes: run,
        operators,
        weights,
        _device_of(weights.values(), found),
        owner,
    )


class _Model:
    """A model as one region: its nested result is taken apart into values, and put together again by generated code."""

    def __init__(
        self, model: Callable[..., Any], arguments: Mapping[str, Any], symbols: Sequence[str], found: Sequence[Leaf]
    ) -> None:
        self._model = model
        self._arguments = arguments
        self._symbols = len(symbols)
        self._paths = [leaf.path for leaf in found]

    def whole(self, *passed: Any) -> Any:
        """Call the model with flat arguments."""
        by_path = dict(zip(self._paths, passed[self._symbols :], strict=True))
        return self._model(**{n: map_leaves(lambda path, _: by_path[path], v, n) for n, v in self._arguments.items()})

    def region(self, passed: tuple[str, ...]) -> BoundRegion:
        return BoundRegion(MODEL, MODEL, lambda *given: (self.whole(*given),), passed, ("result",))

    def result(self) -> BoundResult:
        return BoundResult(lambda result: result, ("result",))


def rebuild_from_leaves(value: Any, names: Callable[[str, Any], str | None]) -> tuple[Callable[..., Any], list[str]]:
    """Return a function that builds nested `value` anew from its leaves, and the names of its parameters.

    `names` gives the parameter that stands for a leaf, or None where the leaf is a constant.
    """
    used: dict[str, None] = {}

    def describe_leaf(path: str, leaf: Any) -> dict[str, Any]:
        name = names(path, leaf)
        if name is None:
            return {"kind": "constant", "value": leaf}
        used[name] = None
        return {"kind": "value", "expression": name}

    classes: dict[str, str] = {}
    expression = render(describe(value, describe_leaf), classes)
    space: dict[str, Any] = {}
    for short, place in classes.items():
        space[short] = next(type(v) for v in _nested(value) if f"{type(v).__module__}:{type(v).__qualname__}" == place)
    exec(f"def build({', '.join(used)}): return {expression}", space)
    return space["build"], list(used)


def _nested(value: Any) -> Iterable[Any]:
    yield value
    for _, _, child in children(value, "result") or ():
        yield from _nested(child)


def _spec(tensor: Tensor, dims: Mapping[int, Any]) -> TensorSpec:
    shape = tuple(dims[d].name if d in dims else size for d, size in enumerate(tensor.shape))
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), shape, stride, tensor.device.type)


def _device_of(tensors: Iterable[Tensor], found: Sequence[Leaf]) -> torch.device:
    first = next(iter(tensors), None)
    if first is not None:
        return first.device
    kinds = [leaf.spec.device for leaf in found if isinstance(leaf.spec, TensorSpec)]
    return torch.device(kinds[0]) if kinds else torch.device("cpu")
