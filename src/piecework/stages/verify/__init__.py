"""Verify: an artifact is run beside its piece's text before anybody is served by it.

It is loaded by the loader that serves it, and its results are held to the one tolerance rule at both ends of its box
and one size between, on inputs drawn from the specs of its parameters, with the model's own weights where it has some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.seam.evaluate import (
    Change,
    evaluate,
    is_random,
    is_unsettled,
    operators_of,
    switches_precision,
    value_names,
    writes_in_place,
)
from piecework.seam.fx import PieceGraph, parse_piece
from piecework.seam.loader import load
from piecework.stages.verify.draw import Source, own_inputs
from piecework.stages.verify.sizes import sizes_to_try
from piecework.values.artifact import TEXT, Artifact, LoadedPiece
from piecework.values.declaration import registry
from piecework.values.difference import Difference, compare
from piecework.values.graph import Plan
from piecework.values.shapes import Box
from piecework.values.signature import TensorSpec
from piecework.values.tolerance import reference_dtype
from piecework.values.verdict import FAILED, HELD, UNTRIED, Verdict

KernelPath = Callable[[str], Path]
# Gives a piece's own weights by its number, in the text's order, or None where the model has none.
WeightsOf = Callable[[int], Sequence[Tensor] | None]
_FILLS = (2.0, 3.0)  # what unwritten memory holds in two runs of eager: what differs between them is no result
_CANNOT_RUN = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError, PieceworkError)


def own_weights(model: torch.nn.Module, device: str, plan: Plan, constants: Mapping[str, Tensor]) -> WeightsOf:
    """Return what gives the weights of each piece's first site; a model without weights gives none.

    Tensors:
        constants  any  met in the code, by name
    """
    tensors: dict[str, Tensor] = {**dict(model.named_buffers(remove_duplicate=False)), **constants}
    tensors |= dict(model.named_parameters(remove_duplicate=False))

    def weights_of(number: int) -> Sequence[Tensor] | None:
        site = next(region for region in plan.regions if region.piece == number)
        names = [plan.values[a].name for a in site.arguments if a in plan.values and plan.values[a].is_static]
        found = [tensors[name].detach() for name in names if name in tensors]
        # A fake tensor, or one on the meta device, holds nothing to compute with.
        is_real = all(type(each) is Tensor and each.device.type == device for each in found)
        return found if found and is_real and len(found) == len(names) else None

    return weights_of


class Verification:
    """Tries artifacts one piece at a time; what is drawn for a piece serves all its artifacts, one after another."""

    def __init__(self, kernel_path: KernelPath, weights_of: WeightsOf = lambda number: None) -> None:
        self._kernel_path = kernel_path
        self._weights_of = weights_of
        self._text = ""
        self._piece: PieceGraph | None = None
        self._source: Source | None = None

    def __call__(self, number: int, text: str, box: Box, artifact: Artifact) -> Verdict:
        """Run an artifact beside its text at some sizes of a box; say whether it may serve."""
        if artifact.kind == TEXT and artifact.text == text:
            return Verdict(UNTRIED)
        if text != self._text or self._piece is None or self._source is None:
            self._text, self._piece = text, parse_piece(text)
            self._source = Source(self._piece, self._weights_of(number))
        origin = "drawn" if self._source.is_drawn else "real"
        opaque = [name for name in operators_of(self._piece) if registry.get(name) is not None]
        if opaque:
            return Verdict(UNTRIED, f"it calls `{opaque[0]}`, whose work lies outside the piece")
        try:
            loaded = load(artifact, kernel_path=self._kernel_path)
        except PieceworkError as error:
            return Verdict(UNTRIED, f"it does not load here: {error.message}")
        except Exception as error:  # noqa: BLE001  text that a compiler wrote may fail in any way
            return Verdict(FAILED, f"it does not load: `{type(error).__name__}: {error}`", {"verified": "failed"})
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices, enabled=is_random(self._piece)):
            return _try_all(self._piece, box, loaded, self._source, origin)


def _try_all(piece: PieceGraph, box: Box, loaded: LoadedPiece, source: Source, origin: str) -> Verdict:
    _run_eager(piece, {name: size.low for name, size in box.items()}, source)  # finds what kind of inputs suits it
    points, rows = sizes_to_try(piece, box, source)
    errors: dict[str, list[float | None]] = {}
    reason = ""
    for sizes in points:
        where = ",".join(f"{name}={size}" for name, size in sizes.items()) or "static"
        found, why = _try_one(piece, sizes, loaded, source)
        if found is None:
            reason = reason or f"eager does not run on inputs drawn for `{where}`: {why}"
            continue
        errors[where] = [_plain(each) for each in found]
        fault = next((each.fault for each in found if each.is_fault), "")
        if fault:
            facts = {"verified": "failed", "errors": errors, "rows": rows}
            return Verdict(FAILED, f"at {where} {fault}", facts)
    if not errors:
        return Verdict(UNTRIED, reason)
    return Verdict(HELD, reason, {"verified": origin, "errors": errors, "rows": rows})


def _plain(found: Difference) -> float | None:
    """Return an error as the record keeps it: two digits, `None` where there was nothing to compare."""
    if not found.is_compared:
        return None
    return float(f"{found.error:.2g}") if math.isfinite(found.error) else -1.0


def _try_one(
    piece: PieceGraph, sizes: Mapping[str, int], loaded: LoadedPiece, source: Source
) -> tuple[list[Difference] | None, str]:
    """Compare at one size; without a result, say why eager does not run there."""
    values, eager, why = _run_eager(piece, sizes, source)
    if eager is None:
        return None, why
    settled = _settled(piece, values, eager)
    reference = _reference(piece, values, eager)
    given = own_inputs(piece, values)
    try:
        results = _all_results(piece, _call(piece, loaded, given), given)
    except Exception as error:  # noqa: BLE001  code that a compiler wrote may fail in any way
        text = str(error).strip().splitlines()
        return [Difference("result", math.inf, 0.0, math.inf, f"it raises `{type(error).__name__}: {text[:1]}`")], ""
    if len(results) != len(eager):
        fault = f"it returns {len(results)} results, eager {len(eager)}"
        return [Difference("result", math.inf, 0.0, math.inf, fault)], ""
    names = _result_names(piece)
    found = []
    for index, (name, result, wanted) in enumerate(zip(names, results, eager, strict=True)):
        if isinstance(wanted, Tensor):
            exact = reference[index] if reference is not None else None
            found.append(compare(name, result, wanted, exact, settled[index]))
        elif result != wanted:
            found.append(Difference(name, math.inf, 0.0, math.inf, f"`{name}` is `{result}`, in eager `{wanted}`"))
    return found, ""


def _run_eager(piece: PieceGraph, sizes: Mapping[str, int], source: Source) -> tuple[list[Any], list[Any] | None, str]:
    """Run the text on drawn inputs; where they do not suit it, draw others: smaller indices, floats above zero."""
    why, values = "", []
    for most in (0, 2, 1):
        source.most = source.most if source.most and not most else most
        values = source.draw(sizes)
        given = own_inputs(piece, values)
        try:
            eager = _all_results(piece, _seeded(piece, given, _FILLS[0]), given)
        except _CANNOT_RUN as error:
            why = f"`{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}`"
            continue
        if source.is_positive or not any(_is_void(value) for value in eager):
            return values, eager, ""
        source.is_positive = True
        return _run_eager(piece, sizes, source)
    return values, None, why


def _is_void(value: Any) -> bool:
    """Tell whether a result holds no number at all: then nothing would be compared."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return not bool(torch.isfinite(value.float()).any())


def _seeded(piece: PieceGraph, values: Sequence[Any], fill: float) -> tuple[Any, ...]:
    if is_random(piece):
        torch.manual_seed(int(fill))
    return evaluate(piece, values, Change(fill=fill))


def _settled(piece: PieceGraph, values: Sequence[Any], eager: Sequence[Any]) -> list[Tensor | None]:
    """Mark the elements that hold a value: equal in two runs that differ in unwritten memory and random numbers."""
    if not is_unsettled(piece):
        return [None] * len(eager)
    given = own_inputs(piece, values)
    again = _all_results(piece, _seeded(piece, given, _FILLS[1]), given)
    return [
        (one == two) | ((one != one) & (two != two)) if isinstance(one, Tensor) else None
        for one, two in zip(eager, again, strict=True)
    ]


def _reference(piece: PieceGraph, values: Sequence[Any], eager: Sequence[Any]) -> list[Any] | None:
    """Run the text in higher precision; None where it cannot be, or gives something of another shape there."""
    floats = [spec.dtype for _, spec in piece.parameters if isinstance(spec, TensorSpec) and "float" in spec.dtype]
    dtypes = {reference_dtype(dtype) for dtype in floats} or {"float64"}
    wanted = getattr(torch, "float64" if "float64" in dtypes else "float32")
    if switches_precision(piece):
        return None
    given = own_inputs(piece, values)
    if writes_in_place(piece):
        given = [value.to(_wide(value, wanted)) if isinstance(value, Tensor) else value for value in given]
    try:
        found = _all_results(piece, evaluate(piece, given, Change(fill=_FILLS[0], dtype=wanted)), given)
    except _CANNOT_RUN:
        return None
    return found if list(map(_shape, found)) == list(map(_shape, eager)) else None


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else type(value)


def _wide(value: Tensor, wanted: torch.dtype) -> torch.dtype:
    return wanted if value.is_floating_point() and value.dtype.itemsize < wanted.itemsize else value.dtype


def _call(piece: PieceGraph, loaded: LoadedPiece, values: Sequence[Any]) -> tuple[Any, ...]:
    weights = {n for n, spec in piece.parameters if isinstance(spec, TensorSpec) and spec.is_weight}
    pairs = [(name, value) for (name, _), value in zip(piece.parameters, values, strict=True)]
    with torch.no_grad():
        call = loaded.bind([value for name, value in pairs if name in weights])
        return tuple(call(*(value for name, value in pairs if name not in weights)))


def _all_results(piece: PieceGraph, results: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Return the results, and the inputs after the call where a piece writes in place: they are results as well."""
    if not writes_in_place(piece):
        return list(results)
    return [*results, *(value for value in given if isinstance(value, Tensor))]


def _result_names(piece: PieceGraph) -> list[str]:
    names = list(value_names(piece))
    if writes_in_place(piece):
        names += [f"{name} after the call" for name, spec in piece.parameters if isinstance(spec, TensorSpec)]
    return names


__all__ = ["HELD", "UNTRIED", "Verification"]
