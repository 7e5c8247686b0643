"""Run a piece's graph node by node: as it stands, in higher precision, or for shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from piecework.seam.fx import PieceGraph
from piecework.seam.kinds import is_view, mutated_arguments
from piecework.seam.stand_in import stand_in
from piecework.values.declaration import registry

Note = Callable[[fx.Node, Any], None]
META = torch.device("meta")
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "normal", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "poisson",
    "multinomial", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout", "rrelu",
}  # fmt: skip
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


@dataclass(frozen=True)
class Layout:
    """The layout of a value that was computed for its shape alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int


@dataclass(frozen=True)
class Change:
    """How a run departs from the text: what unwritten memory holds, and in which precision or where it computes."""

    fill: float | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    note: Note | None = field(default=None, compare=False)


def evaluate(piece: PieceGraph, values: Sequence[Any], change: Change | None = None) -> tuple[Any, ...]:
    """Run a piece on values for all its parameters in the text's order, weights too; return what it returns.

    With `dtype` every float narrower than that is computed in it, given values included. Values are written in place
    where the piece does so.
    """
    run = _Run(piece, change or Change())
    with torch.no_grad():
        return tuple(run.run(*map(run.widened, values)))


def layouts(piece: PieceGraph, values: Sequence[Any]) -> tuple[dict[str, Layout], bool]:
    """Compute the layout of each value, without memory for it; whether all of them could be.

    What depends on data cannot: layouts are then those of the nodes before it.
    """
    found: dict[str, Layout] = {}

    def note(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor):
            found[node.name] = Layout(tuple(value.shape), value.dtype, value.numel() * value.element_size())

    given = [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=META) if isinstance(v, Tensor) else v
        for v in values
    ]
    try:
        evaluate(piece, given, Change(device=META, note=note))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return found, False
    return found, True


def is_unsettled(piece: PieceGraph) -> bool:
    """Tell whether a piece leaves memory unwritten, or draws random numbers."""
    return any(call_name(node) in _ALLOCATIONS | _RANDOM for node in piece.graph.nodes)


def is_random(piece: PieceGraph) -> bool:
    """Tell whether a piece draws random numbers."""
    return any(call_name(node) in _RANDOM for node in piece.graph.nodes)


def writes_in_place(piece: PieceGraph) -> bool:
    """Tell whether a piece writes to any tensor that it did not just make."""
    return any(_is_given(argument) for node in piece.graph.nodes for argument in mutated_arguments(node))


def _is_given(node: fx.Node) -> bool:
    """Tell whether a value may be memory of a parameter: one itself, or a view of one."""
    while node.op != "placeholder":
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or not (is_view(node) or mutated_arguments(node)):
            return False
        node = first
    return True


def switches_precision(piece: PieceGraph) -> bool:
    """Tell whether a piece switches autocast on, so that its precision is not that of its text."""
    return any("autocast" in call_name(node) for node in piece.graph.nodes)


def is_opaque(target: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> bool:
    """Tell whether an operator is declared opaque: what it does lies outside the piece."""
    name = target._name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
    return registry.get(name.partition(".")[0]) is not None


def operators_of(piece: PieceGraph) -> tuple[str, ...]:
    """Return the registered operators that a piece calls, as `ns::op`, those of torch itself left out."""
    names = set()
    for node in piece.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            names.add(f"{node.target.namespace}::{node.target._opname}")
        elif isinstance(node.target, torch._ops.OpOverloadPacket):
            names.add(node.target._qualified_op_name)
    return tuple(sorted(name for name in names if name.partition("::")[0] not in ("aten", "prims", "prim")))


def call_name(node: fx.Node) -> str:
    """Return the bare name of what a node calls: `view`, `embedding`, `getitem`."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "_opname", "") or getattr(node.target, "__name__", "")).partition(".")[0]


def value_names(piece: PieceGraph) -> tuple[str, ...]:
    """Return the names that a piece gives to its results in the text, in order."""
    (items,) = piece.graph.output_node().args
    return tuple(item.name if isinstance(item, fx.Node) else repr(item) for item in items)  # type: ignore[union-attr]


class _Run(fx.Interpreter):
    """The interpreter, with the changes asked for."""

    def __init__(self, piece: PieceGraph, change: Change) -> None:
        super().__init__(torch.nn.Module(), graph=piece.graph)
        self.extra_traceback = False
        self.change = change

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op in ("call_function", "call_method"):
            value = self._filled(n, self.widened(value))
        if self.change.note is not None and n.op != "output":
            self.change.note(n, value)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and is_opaque(target):
            target = stand_in(target)
        return super().call_function(target, self._mapped(args), self._mapped(kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self.change.dtype is not None and target in _CASTS and not kwargs:
            return args[0].to(self._mapped(_CASTS[target]))
        return super().call_method(target, self._mapped(args), self._mapped(kwargs))

    def widened(self, value: Any) -> Any:
        """Return a value whose tensors have the precision that this run computes in."""
        wanted = self.change.dtype
        if wanted is None:
            return value
        if isinstance(value, Tensor):
            own = self._wider(value.dtype)
            return value if own is value.dtype else value.to(own)
        if type(value) in (tuple, list):
            return type(value)(map(self.widened, value))
        return value

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        wanted = self.change.dtype
        if wanted is None:
            return dtype
        if dtype.is_floating_point and dtype.itemsize < wanted.itemsize:
            return wanted
        if dtype.is_complex and dtype.itemsize < 2 * wanted.itemsize:
            return wanted.to_complex()
        return dtype

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._wider(value)
        if isinstance(value, torch.device) and self.change.device is not None:
            return self.change.device
        if type(value) in (tuple, list):
            return type(value)(map(self._mapped, value))
        if isinstance(value, Mapping):
            return {key: self._mapped(inner) for key, inner in value.items()}
        return value

    def _filled(self, node: fx.Node, value: Any) -> Any:
        if self.change.fill is not None and isinstance(value, Tensor) and call_name(node) in _ALLOCATIONS:
            value.fill_(bool(self.change.fill) if value.dtype is torch.bool else self.change.fill)
        return value
