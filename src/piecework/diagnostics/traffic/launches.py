"""Walk a program's graph at given sizes, without memory, and note what each region launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from piecework.errors import ModelError
from piecework.seam.meter import Launch, Meter
from piecework.seam.rebuild import size_at
from piecework.stages.graph_text import computation_graph
from piecework.values.record import Record
from piecework.values.signature import ScalarSpec, TensorSpec, contiguous_stride, parse_spec
from piecework.values.tree import leaves

ReferenceOf = Callable[[str], Callable[..., Any] | None]


@dataclass(frozen=True)
class RegionLaunches:
    """What one region launches; `piece` is the number of its piece, -1 for calls that are made as they stand."""

    region: int
    piece: int
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Walk:
    """All regions in order, the memory that holds weights, and the memory that leaves the program."""

    regions: tuple[RegionLaunches, ...]
    weights: frozenset[int]
    results: frozenset[int]


def walk(
    record: Record, pieces: Sequence[str], sizes: Mapping[str, int], reference_of: ReferenceOf = lambda name: None
) -> Walk:
    """Run the graph of a record, whose pieces have the texts `pieces`, on tensors that have sizes alone.

    `reference_of` gives for an operator's name what it is made of, or None.
    """
    meter = Meter(reference_of)
    regions: list[RegionLaunches] = []
    space: dict[str, Any] = {}
    exec(compile(computation_graph("traffic", _with_whole_weights(record), pieces), "<graph>", "exec"), space)
    for name, function in list(space.items()):
        if name.startswith(("piece_", "opaque_", "inline_")):
            space[name] = _noted(function, record, regions, meter)
    weights = {
        binding["name"]: _tensor(binding["spec"], sizes, meter)
        for binding in record.values.values()
        if binding["kind"] in ("weight", "buffer", "constant")
    }
    arguments = _arguments(space["computation_graph"], record, sizes, meter)
    with meter.watching():
        result = space["computation_graph"](*arguments, weights)
    left = {meter.memory_of(leaf) for _, leaf in leaves(result, "") if hasattr(leaf, "untyped_storage")}
    return Walk(tuple(regions), frozenset(map(meter.memory_of, weights.values())), frozenset(left))


def _with_whole_weights(record: Record) -> Record:
    """Name what is joined of several weights as the one tensor that it is in a program, which joins them once."""
    return replace(record, values={name: {**b, "parts": ()} for name, b in record.values.items()})


def _noted(
    function: Callable[..., Any], record: Record, regions: list[RegionLaunches], meter: Meter
) -> Callable[..., Any]:
    """Note what a region's function launches; each region is one call, in order."""

    def call(*args: Any) -> Any:
        before = len(meter.launches)
        result = function(*args)
        index = len(regions)
        piece = record.regions[index].get("piece", -1) if record.regions[index]["kind"] == "piece" else -1
        regions.append(RegionLaunches(index, piece, tuple(meter.launches[before:])))
        return result

    return call


def _arguments(
    function: Callable[..., Any], record: Record, sizes: Mapping[str, int], meter: Meter
) -> list[Any]:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount - 1]
    made: list[Any] = []
    for name in names:
        binding = record.values.get(name)
        if binding is None:
            leaf = record.inputs[int(name[1:])]
            made.append(leaf["value"] if leaf["spec"] is None else _tensor(leaf["spec"], sizes, meter))
        elif binding["kind"] == "symbol":
            made.append(sizes[binding["name"]])
        else:
            made.append(_tensor(binding["spec"], sizes, meter))
    return made


def _tensor(text: str, sizes: Mapping[str, int], meter: Meter) -> Any:
    spec = parse_spec(text)
    if isinstance(spec, ScalarSpec):
        raise ModelError(
            f"a program takes a `{spec.kind}` whose value is not known, so that its traffic cannot be told",
            hint="make the number a tensor, or a constant",
        )
    assert isinstance(spec, TensorSpec)
    shape = tuple(int(size_at(size, sizes)) for size in spec.shape)
    stride = contiguous_stride(shape) if spec.stride is None else tuple(int(size_at(s, sizes)) for s in spec.stride)
    return meter.tensor(shape, stride, spec.dtype, spec.device)
