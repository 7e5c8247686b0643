"""The values between trace and plan: a traced graph, its cut, and the plan that a record keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from piecework.values.signature import Spec
from piecework.values.tree import Tree


@dataclass(frozen=True)
class Binding:
    """What one input of the graph is: a `symbol`, a user `input`, a `weight`, a `buffer` or a `constant`.

    `name` is the symbol's name, the input's path, or the tensor's qualified name; `aliases` are further
    names of the same tensor (tied weights).
    """

    kind: str
    name: str
    spec: Spec | None = None
    aliases: tuple[str, ...] = ()
    is_persistent: bool = True

    @property
    def is_static(self) -> bool:
        return self.kind in ("weight", "buffer", "constant")


@dataclass(frozen=True)
class InputLeaf:
    """One leaf of the caller's arguments: a tensor with its spec, or a constant that must be equal."""

    path: str
    spec: Spec | None
    value: Any = None
    same_as: str = ""


@dataclass(frozen=True)
class SymbolSource:
    """Where a declared size is read, and every further place that must agree with it."""

    name: str
    kind: str
    places: tuple[tuple[str, int], ...]
    low: int = 1
    high: int = 0


@dataclass(frozen=True)
class ShapeGuard:
    """A condition on sizes that the trace relied on: a Python expression over the declared names."""

    expression: str
    line: str


@dataclass(frozen=True)
class TracedGraph:
    """One full graph; weights are inputs, sizes are symbols, the result's structure is data."""

    graph: fx.Graph
    bindings: Mapping[str, Binding]
    inputs: tuple[InputLeaf, ...]
    arguments: tuple[str, ...]
    symbols: tuple[SymbolSource, ...]
    result: Tree
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shape_guards: tuple[ShapeGuard, ...] = ()
    guards: tuple[Any, ...] = ()
    code: tuple[Any, ...] = ()


@dataclass(frozen=True)
class OpaqueCall:
    """One call of an opaque operator: its qualified name, arguments as Python text, names of its results."""

    operator: str
    arguments: str
    results: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """What lies between two cuts: a site of a piece (`piece >= 0`) or opaque calls.

    `arguments` are expressions over program values in the piece text's order, `results` the names that the
    region gives to what leaves it.
    """

    piece: int
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    calls: tuple[OpaqueCall, ...] = ()

    @property
    def is_opaque(self) -> bool:
        return self.piece < 0


@dataclass(frozen=True)
class Plan:
    """The cut graph as text: distinct pieces, and the regions that use them, in order."""

    pieces: tuple[str, ...]
    regions: tuple[Region, ...]
    result: Tree
    split_ops: tuple[str, ...]

    @property
    def sites(self) -> int:
        return sum(not region.is_opaque for region in self.regions)

    @property
    def opaque(self) -> int:
        return sum(region.is_opaque for region in self.regions)
