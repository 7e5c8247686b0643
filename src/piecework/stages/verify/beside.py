"""A piece's text run on given inputs: what it gives, in higher precision too, and which elements hold a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.seam.evaluate import (
    Change,
    evaluate,
    is_random,
    is_unsettled,
    switches_precision,
    value_names,
    writes_in_place,
)
from piecework.seam.fx import PieceGraph
from piecework.values.artifact import LoadedPiece
from piecework.values.difference import Difference, compare, copy_of
from piecework.values.signature import Spec, TensorSpec
from piecework.values.tolerance import ULP, reference_dtype

CANNOT_RUN = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError, PieceworkError)
_FILLS = (2.0, 3.0)  # what unwritten memory holds in two runs of eager: what differs between them is no result
_NEIGHBOURS = 8
_MOST_BYTES = 4 << 30  # of weights in higher precision
# The same on a GPU where weights are drawn: a build has to fit beside whatever else uses the GPU.
DEVICE_BYTES = 3 << 28
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Expected:
    """What a piece's text gives for some inputs, under the names that it gives its results."""

    piece: PieceGraph
    values: Sequence[Any]
    names: tuple[str, ...]
    eager: Sequence[Any]
    reference: Sequence[Any] | None
    settled: Sequence[Tensor | None]
    known_errors: Sequence[float] = ()

    def against(self, loaded: LoadedPiece) -> list[Difference]:
        """Run a compiled form on the same inputs, and compare each of its results."""
        given = own_inputs(self.piece, self.values)
        try:
            results = all_results(self.piece, call_loaded(self.piece, loaded, given), given)
        except Exception as error:  # noqa: BLE001  code that a compiler wrote may fail in any way
            first = (str(error).strip().splitlines() or [""])[0]
            return [_fault("result", f"it raises `{type(error).__name__}: {first}`")]
        if len(results) != len(self.eager):
            return [_fault("result", f"it returns {len(results)} results, eager {len(self.eager)}")]
        found = []
        for index, (name, result, wanted) in enumerate(zip(self.names, results, self.eager, strict=True)):
            if isinstance(wanted, Tensor):
                exact = self.reference[index] if self.reference is not None else None
                known = self.known_errors[index] if self.known_errors else 0.0
                found.append(compare(name, result, wanted, exact, self.settled[index], eager_error=known))
            elif result != wanted:
                found.append(_fault(name, f"`{name}` is `{result}`, in eager `{wanted}`"))
        return found

    def eager_error(self) -> float:
        """Return the largest error that eager itself has against the reference."""
        return max(self.eager_errors(), default=0.0)

    def eager_errors(self) -> list[float]:
        """Return the error that eager itself has in each result; 0 where there is none to measure."""
        if self.reference is None:
            return [0.0] * len(self.eager)
        found = [
            compare(name, one, one, exact, settled).error if _is_float(one) else 0.0
            for name, one, exact, settled in zip(self.names, self.eager, self.reference, self.settled, strict=True)
        ]
        return [error if math.isfinite(error) else 0.0 for error in found]

    def on_neighbours(self, widened: Widened | None = None) -> Expected:
        """Return the same with what eager is off at most on inputs that differ from these in their last bits.

        Where a result is a small difference of large numbers, eager's error is a matter of luck: one sample of it says
        little of the next.
        """
        found = [self.eager_errors()]
        for seed in range(_NEIGHBOURS):
            generator = torch.Generator().manual_seed(seed)
            pairs = zip(self.values, self.piece.parameters, strict=True)
            values = [_nudged(value, generator) if not _is_weight(spec) else value for value, (_, spec) in pairs]
            found.append(expect(self.piece, values, widened).eager_errors())
        return replace(self, known_errors=tuple(map(max, zip(*found, strict=True))))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _nudged(value: Any, generator: torch.Generator) -> Any:
    """Move each number by about its last bit, up, down or not."""
    if not _is_float(value):
        return value
    unit = ULP.get(str(value.dtype).removeprefix("torch."), 0.0)
    steps = torch.randint(-1, 2, tuple(value.shape), generator=generator).to(value.device)
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return moved.copy_(value.double() * (1 + unit * steps))


def expect(piece: PieceGraph, values: Sequence[Any], widened: Widened | None = None) -> Expected:
    """Run the text on inputs, which stay as they are; raise what it raises.

    `widened` keeps weights in higher precision from one call to the next.
    """
    eager = _run(piece, values, Change(fill=_FILLS[0]))
    settled: list[Tensor | None] = [None] * len(eager)
    if is_unsettled(piece):
        again = _run(piece, values, Change(fill=_FILLS[1]))
        settled = [_is_settled(one, two) for one, two in zip(eager, again, strict=True)]
    return Expected(piece, values, _result_names(piece), eager, _reference(piece, values, eager, widened), settled)


def _run(piece: PieceGraph, values: Sequence[Any], change: Change) -> list[Any]:
    given = own_inputs(piece, values)
    if is_random(piece):
        torch.manual_seed(int(change.fill or 0))
    return all_results(piece, evaluate(piece, given, change), given)


def _is_settled(one: Any, two: Any) -> Tensor | None:
    """Mark the elements that two runs agree on; None where that is all of them."""
    if not isinstance(one, Tensor) or torch.equal(one, two):
        return None
    same: Tensor = (one == two) | ((one != one) & (two != two))
    return same


def _reference(
    piece: PieceGraph, values: Sequence[Any], eager: Sequence[Any], widened: Widened | None
) -> list[Any] | None:
    """Run the text in higher precision; None where it cannot be, or gives something of another shape there."""
    floats = [spec.dtype for _, spec in piece.parameters if isinstance(spec, TensorSpec) and "float" in spec.dtype]
    dtypes = {reference_dtype(dtype) for dtype in floats} or {"float64"}
    wanted = getattr(torch, "float64" if "float64" in dtypes else "float32")
    size_bytes = sum(v.numel() for v in values if isinstance(v, Tensor) and v.is_floating_point()) * wanted.itemsize
    if switches_precision(piece) or size_bytes > _MOST_BYTES:
        return None
    place = _CPU if widened is not None and size_bytes > widened.device_bytes else None
    given = own_inputs(piece, values)
    if place is not None:
        given = [value.to(place) if isinstance(value, Tensor) and not _is_weight(spec) else value
                 for value, (_, spec) in zip(given, piece.parameters, strict=True)]  # fmt: skip
    if writes_in_place(piece):
        given = [_widen(value, wanted, place) if isinstance(value, Tensor) else value for value in given]
    elif widened is not None:
        given = [widened.of(value, wanted, place) if _is_weight(spec) else value
                 for value, (_, spec) in zip(given, piece.parameters, strict=True)]  # fmt: skip
    try:
        found = all_results(piece, evaluate(piece, given, Change(fill=_FILLS[0], dtype=wanted, device=place)), given)
    except CANNOT_RUN:
        return None
    return found if list(map(_shape, found)) == list(map(_shape, eager)) else None


def _is_weight(spec: Spec) -> bool:
    return isinstance(spec, TensorSpec) and spec.is_weight


class Widened:
    """Weights in higher precision, each made once; of inputs beyond `device_bytes` they are made on the CPU."""

    def __init__(self, device_bytes: float = math.inf) -> None:
        self.device_bytes = device_bytes
        self._made: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def of(self, value: Tensor, wanted: torch.dtype, place: torch.device | None) -> Tensor:
        """Return a weight in the precision of the reference, on a device of its own if one is given.

        Tensors:
            value  [...]  model
            ->     [...]        wider
        """
        key = (id(value), _wide(value, wanted))
        if key not in self._made:
            self._made[key] = (value, _widen(value, wanted, place))  # held, so that no other gets its identity
        return self._made[key][1]


def _widen(value: Tensor, wanted: torch.dtype, place: torch.device | None) -> Tensor:
    dtype = _wide(value, wanted)
    return (value if place is None else value.to(place)).to(dtype)


def _wide(value: Tensor, wanted: torch.dtype) -> torch.dtype:
    return wanted if value.is_floating_point() and value.dtype.itemsize < wanted.itemsize else value.dtype


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else type(value)


def own_inputs(piece: PieceGraph, values: Sequence[Any]) -> list[Any]:
    """Return inputs that one run may write to: copies where the piece writes in place, else the values themselves."""
    if not writes_in_place(piece):
        return list(values)
    return [copy_of(value) if isinstance(value, Tensor) else value for value in values]


def call_loaded(piece: PieceGraph, loaded: LoadedPiece, values: Sequence[Any]) -> tuple[Any, ...]:
    """Call a compiled form with values for all of a piece's parameters, weights too."""
    weights = {n for n, spec in piece.parameters if isinstance(spec, TensorSpec) and spec.is_weight}
    pairs = [(name, value) for (name, _), value in zip(piece.parameters, values, strict=True)]
    with torch.no_grad():
        call = loaded.bind([value for name, value in pairs if name in weights])
        return tuple(call(*(value for name, value in pairs if name not in weights)))


def all_results(piece: PieceGraph, results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Return the results, and the inputs after the call where a piece writes in place: they are results as well."""
    if not writes_in_place(piece):
        return list(results)
    return [*results, *(value for value in given if isinstance(value, Tensor))]


def _result_names(piece: PieceGraph) -> tuple[str, ...]:
    names = value_names(piece)
    if writes_in_place(piece):
        names += tuple(f"{name} after the call" for name, spec in piece.parameters if isinstance(spec, TensorSpec))
    return names


def _fault(name: str, text: str) -> Difference:
    return Difference(name, math.inf, 0.0, math.inf, text)
