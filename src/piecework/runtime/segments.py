"""Segments: what a captured program is a list of. A graph's replay is one, a call of an opaque body another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from piecework.errors import CaptureError

Segment = Callable[[], None]


class CopyingCall:
    """An opaque body whose results are fresh memory each time: they are copied to where the next graph reads them."""

    __slots__ = ("arguments", "call", "homes", "name")

    def __init__(
        self, name: str, call: Callable[..., Any], arguments: Sequence[Any], homes: Sequence[Tensor | None]
    ) -> None:
        self.name = name
        self.call = call
        self.arguments = tuple(arguments)
        self.homes = [(index, home) for index, home in enumerate(homes) if home is not None]

    def __call__(self) -> None:
        found = self.call(*self.arguments)
        for index, home in self.homes:
            value = found[index]
            if value.data_ptr() != home.data_ptr():
                if value.shape != home.shape:
                    raise CaptureError(
                        f"`{self.name}` returned shape `{list(value.shape)}`, at capture `{list(home.shape)}`",
                        hint="a result whose shape depends on values cannot cross into a graph",
                        facts={"name": self.name},
                    )
                home.copy_(value)


def opaque_segment(
    name: str, call: Callable[..., Any], arguments: Sequence[Any], homes: Sequence[Tensor | None]
) -> Segment:
    """Return the segment of an opaque call; without results to copy it is the call alone.

    Tensors:
        homes  [...]  any  where the next graph reads each result; None where it lies there already
    """
    if any(home is not None for home in homes):
        return CopyingCall(name, call, arguments, homes)
    return partial(call, *arguments)


@dataclass(frozen=True)
class Output:
    """One value of the result: a tensor in the pool, or the position of a passed argument.

    `dims` are the dimensions that follow a symbol, with the position of its value among the passed arguments.
    """

    tensor: Tensor | None
    position: int = -1
    dims: tuple[tuple[int, int], ...] = ()

    def take(self, passed: Sequence[Any], size: int, is_owned: bool) -> Any:
        """Return the real rows: the caller's own copy, or the memory itself where it is `borrowed`."""
        if self.tensor is None:
            return passed[self.position]
        tensor = self.tensor
        for dim, position in self.dims:
            if passed[position] != size:
                tensor = tensor.narrow(dim, 0, passed[position])
        return tensor.clone() if is_owned else tensor
