"""Verify: an artifact is run beside its piece's text before anybody is served by it.

It is loaded by the loader that serves it, and its results are held to the one tolerance rule at both ends of its box
and one size between, on inputs drawn from the specs of its parameters, with the model's own weights where it has some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piecework.errors import PieceworkError
from piecework.seam.evaluate import is_random, operators_of
from piecework.seam.fx import PieceGraph, parse_piece
from piecework.seam.loader import load
from piecework.seam.stand_in import stand_ins
from piecework.stages.verify.beside import CANNOT_RUN, DEVICE_BYTES, Expected, Widened, expect
from piecework.stages.verify.draw import Source
from piecework.stages.verify.sizes import sizes_to_try
from piecework.values.artifact import INDUCTOR, TEXT, Artifact, LoadedPiece
from piecework.values.difference import Difference
from piecework.values.graph import Plan
from piecework.values.packing import join
from piecework.values.shapes import Box
from piecework.values.signature import TensorSpec
from piecework.values.verdict import FAILED, HELD, UNTRIED, Verdict

KernelPath = Callable[[str], Path]
# Gives a piece's own weights by its number, in the text's order, or None where the model has none.
WeightsOf = Callable[[int], Sequence[Tensor] | None]


def own_weights(model: torch.nn.Module, device: str, plan: Plan, constants: Mapping[str, Tensor]) -> WeightsOf:
    """Return what gives the weights of each piece's first site; a model without weights gives none.

    Tensors:
        constants  any  met in the code, by name
    """
    tensors: dict[str, Tensor] = {**dict(model.named_buffers(remove_duplicate=False)), **constants}
    tensors |= dict(model.named_parameters(remove_duplicate=False))

    def weights_of(number: int) -> Sequence[Tensor] | None:
        site = next(region for region in plan.regions if region.piece == number)
        static = [plan.values[a] for a in site.arguments if a in plan.values and plan.values[a].is_static]
        names = [[name for name, _ in binding.parts] or [binding.name] for binding in static]
        if not names or any(name not in tensors for each in names for name in each):
            return None
        found = [[tensors[name] for name in each] for each in names]
        # A fake tensor, or one on the meta device, holds nothing to compute with.
        is_real = all(type(t.detach()) is Tensor and t.device.type == device for each in found for t in each)
        return [join(each) if len(each) > 1 else each[0].detach() for each in found] if is_real else None

    return weights_of


def draws_on_gpu(model: torch.nn.Module, device: str) -> bool:
    """Tell whether weights have to be drawn on a GPU, since the model holds none there."""
    return device != "cpu" and any(type(p.detach()) is not Tensor or p.is_meta for p in model.parameters())


class Verification:
    """Tries artifacts one piece at a time; what is drawn for a piece serves all its artifacts, one after another.

    On a GPU it is drawn anew for each, so that it takes no memory while the next is compiled.
    """

    def __init__(self, kernel_path: KernelPath, weights_of: WeightsOf = lambda number: None) -> None:
        self._kernel_path = kernel_path
        self._weights_of = weights_of
        self._text = ""
        self._piece: PieceGraph | None = None
        self._source: Source | None = None

    def __call__(self, number: int, text: str, box: Box, artifact: Artifact) -> Verdict:
        """Run an artifact beside its text at some sizes of a box; say whether it may serve."""
        trials = self.trials(number, text, box, artifact)
        while True:
            try:
                next(trials)
            except StopIteration as end:
                verdict: Verdict = end.value
                return verdict

    def trials(self, number: int, text: str, box: Box, artifact: Artifact) -> Generator[None, None, Verdict]:
        """Do the same a size at a time, for whoever has other work to do between two of them."""
        if artifact.kind == TEXT and artifact.text == text:
            return Verdict(UNTRIED)
        if text != self._text or self._piece is None or self._source is None:
            self._text, self._piece = text, parse_piece(text)
            self._source = Source(self._piece, self._weights_of(number))
        origin = "drawn" if self._source.is_drawn else "real"
        bodies = stand_ins(operators_of(self._piece))
        if bodies and artifact.kind not in (TEXT, INDUCTOR):
            return Verdict(UNTRIED, f"it calls `{next(iter(bodies))}`, whose work lies outside the piece")
        try:
            loaded = load(artifact, kernel_path=self._kernel_path)
            loaded = loaded.with_bodies(bodies) if bodies else loaded
        except PieceworkError as error:
            return Verdict(UNTRIED, f"it does not load here: {error.message}")
        except Exception as error:  # noqa: BLE001  text that a compiler wrote may fail in any way
            return Verdict(FAILED, f"it does not load: `{type(error).__name__}: {error}`", {"verified": "failed"})
        if is_filling := _fills_gpu(self._source, self._piece):
            torch.cuda.empty_cache()  # of what the compiler left
        widened = Widened(DEVICE_BYTES if is_filling else math.inf)
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        yield
        fork = partial(torch.random.fork_rng, devices, enabled=is_random(self._piece))
        try:
            return (yield from _try_all(self._piece, box, loaded, self._source, origin, fork, widened))
        finally:
            if is_filling:  # before the next artifact is compiled: its kernels are tuned on memory of their own
                del loaded, widened
                self._source = self._piece = None
                torch.cuda.empty_cache()


def _fills_gpu(source: Source, piece: PieceGraph) -> bool:
    """Tell whether weights are drawn on a GPU, where a build must make do with little memory."""
    return source.is_drawn and any(isinstance(s, TensorSpec) and s.device != "cpu" for _, s in piece.parameters)


def _try_all(
    piece: PieceGraph,
    box: Box,
    loaded: LoadedPiece,
    source: Source,
    origin: str,
    fork: Callable[[], Any],
    widened: Widened,
) -> Generator[None, None, Verdict]:
    low = {name: size.low for name, size in box.items()}
    with fork():
        first = _run_eager(low, source, widened)  # finds what kind of inputs suits it
        points, rows = sizes_to_try(piece, box, source)
    errors: dict[str, list[float | None]] = {}
    reason = ""
    for sizes in points:
        where = ",".join(f"{name}={size}" for name, size in sizes.items()) or "static"
        yield
        with fork():
            expected, why = first if sizes == low else _run_eager(sizes, source, widened)
            found = expected.against(loaded) if expected is not None else []
            faults = [each for each in found if each.is_fault]
            if expected is not None and faults and all(each.is_narrow for each in faults):
                found = expected.on_neighbours(widened).against(loaded)
        if expected is None:
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


def _run_eager(sizes: Mapping[str, int], source: Source, widened: Widened) -> tuple[Expected | None, str]:
    """Run the text on drawn inputs; where they do not suit it, draw others: smaller indices, floats above zero."""
    why = ""
    for most in (source.most, 2, 1):
        source.most = most
        try:
            expected = expect(source.piece, source.draw(sizes), widened)
        except CANNOT_RUN as error:
            why = f"`{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}`"
            continue
        if source.is_positive or not any(map(_is_void, expected.eager)):
            return expected, ""
        source.is_positive = True
        return _run_eager(sizes, source, widened)
    return None, why


def _is_void(value: Any) -> bool:
    """Tell whether a result holds no number at all: then nothing would be compared."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return not bool(torch.isfinite(value.float()).any())
