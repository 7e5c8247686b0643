"""The values between trace and plan: a traced graph, its cut, and the plan that a record keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    names of the same tensor (tied weights). `parts` are the names and rows of the tensors that lie one after
    another in it, where a pass joined them.
    """

    kind: str
    name: str
    spec: Spec | None = None
    aliases: tuple[str, ...] = ()
    is_persistent: bool = True
    parts: tuple[tuple[str, int], ...] = ()

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
    """One full graph; weights are inputs, sizes are symbols, the result's structure is data.

    `split_ops` are the operators that it will be cut at, for passes that must not reach across.
    """

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
    sizes: Mapping[str, int] = field(default_factory=dict)
    containers: tuple[tuple[str, Any], ...] = ()
    split_ops: frozenset[str] = frozenset()


PIECE, OPAQUE, INLINE = "piece", "opaque", "inline"
NOTHING = "none"  # stands for a spec where a fake gives no tensor
FX, BY_COMPILER, UNCUT = "fx", "inductor", "none"  # where a graph is cut: before it is compiled, after it, nowhere


@dataclass(frozen=True)
class Stretch:
    """A run of nodes between two cuts, with what enters and what leaves it."""

    kind: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class SplitGraph:
    """The traced graph, cut: stretches in order over the nodes of the one graph."""

    traced: TracedGraph
    stretches: tuple[Stretch, ...]
    split_ops: tuple[str, ...]
    operators: tuple[str, ...]
    partition: str = FX


@dataclass(frozen=True)
class OpaqueCall:
    """One call made as it stands: an operator's qualified name, arguments and results as Python text.

    `specs` say of each result what the operator's fake said of it, over the program's sizes: empty for a result that
    nobody reads, and of torch's own operators.
    """

    operator: str
    arguments: str
    results: str
    specs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """A site of a piece (`kind == "piece"`), opaque calls, or calls so cheap that they run inline.

    `arguments` are expressions over program values in the piece text's order (symbols, activations,
    weights), `results` the names that the region gives to what leaves it.
    """

    kind: str
    piece: int = -1
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    calls: tuple[OpaqueCall, ...] = ()
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The cut graph as text: distinct pieces, the regions that use them in order, and the result.

    `values` says what each named program input is; every other name is a region's result. Where `partition` says that
    the graph is not cut before it is compiled, `split_ops` stand inside pieces.
    """

    pieces: tuple[str, ...]
    regions: tuple[Region, ...]
    values: Mapping[str, Binding]
    result: Tree
    split_ops: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    partition: str = FX

    @property
    def inside(self) -> tuple[str, ...]:
        """The opaque operators, as `ns::op`, that are called inside pieces."""
        return inside(self.partition, self.split_ops)

    def count(self, kind: str) -> int:
        """Return the number of regions of a kind."""
        return sum(region.kind == kind for region in self.regions)


def inside(partition: str, split_ops: Sequence[str]) -> tuple[str, ...]:
    """Return the opaque operators, as `ns::op`, that pieces call where a graph is cut so."""
    return () if partition == FX else tuple(dict.fromkeys(name.partition(".")[0] for name in split_ops))
