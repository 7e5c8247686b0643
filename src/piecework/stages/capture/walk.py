"""Walk through a program region by region, letting go of each value after its last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecework.errors import CaptureError
from piecework.runtime.regions import BoundRegion, BoundRun
from piecework.values.tree import leaves

Call = Callable[[BoundRegion, list[Any]], Sequence[Any]]


def walk(run: BoundRun, values: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Run every region by `call` on named values; return the values that the result is made of.

    A value is held until the last region that takes it, and no longer: that is what keeps it whole while later graphs
    are recorded, and what lets them use its memory afterwards.
    """
    known = dict(values)
    ends: dict[int, list[str]] = {}
    for name, index in run.last_uses.items():
        ends.setdefault(index, []).append(name)
    for index, region in enumerate(run.regions):
        known |= zip(region.results, call(region, [known[name] for name in region.arguments]), strict=True)
        for name in ends.get(index, ()):
            known.pop(name, None)
    return {name: known[name] for name in run.result.arguments}


def call_plainly(region: BoundRegion, arguments: list[Any]) -> Sequence[Any]:
    """Run a region as the program does."""
    return region.call(*arguments)


@dataclass(frozen=True)
class ResultNote:
    """What an opaque call gave: fresh memory of a layout, a view of an argument, or nothing."""

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    argument: int = -1
    offset: int = 0

    def home(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return where the next graph reads this result: its own memory, or that of the argument which it views."""
        if self.kind == "none":
            return None
        if self.kind == "view":
            return torch.as_strided(tensors[self.argument], self.shape, self.stride, self.offset)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def tensors_in(arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among nested arguments, in order."""
    return [leaf for _, leaf in leaves(list(arguments), "argument") if isinstance(leaf, Tensor)]


def note_results(name: str, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[ResultNote, ...]:
    """Describe what an opaque call returned, so that a capture need not make it.

    A number is refused: a graph would keep the one of the capture for ever.
    """
    owners = {
        tensor.untyped_storage().data_ptr(): index
        for index, tensor in enumerate(tensors_in(arguments))
        if tensor.numel()
    }
    notes = []
    for value in results:
        if value is None:
            notes.append(ResultNote(name, "none"))
        elif not isinstance(value, Tensor):
            raise CaptureError(
                f"`{name}` returns a `{type(value).__name__}` that code after it uses: a graph would keep this one",
                hint="return a tensor, or leave the phase uncaptured",
                facts={"name": name},
            )
        else:
            owner = owners.get(value.untyped_storage().data_ptr(), -1) if value.numel() else -1
            kind = "view" if owner >= 0 else "fresh"
            notes.append(
                ResultNote(
                    name,
                    kind,
                    tuple(value.shape),
                    tuple(value.stride()),
                    value.dtype,
                    value.device,
                    owner,
                    int(value.storage_offset()),
                )
            )
    return tuple(notes)
