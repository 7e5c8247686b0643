"""Draw inputs for a piece from the specs of its parameters: floats that stay in range, whole numbers that are valid
indices of whatever they index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piecework.seam.evaluate import Layout, call_name, layouts
from piecework.seam.fx import PieceGraph
from piecework.values.predicate import NUMBERS, evaluate
from piecework.values.signature import ScalarSpec, Size, TensorSpec, contiguous_stride

_SMALL = 8  # whole numbers that index nothing are drawn below this
_DATA_SIZE = 3  # a size that is known at run time only
_BY_DIMENSION = {
    "index_select", "gather", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce",
}  # fmt: skip
_PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)
_LARGE = 1 << 24  # bytes of a weight that, drawn on a GPU, lies in the same memory as others
_APART = 64  # elements between the beginnings of two such

Sizes = Mapping[str, int]


def size_of(size: Size, sizes: Sizes) -> int:
    """Return a size of a spec as a number."""
    return size if isinstance(size, int) else int(evaluate(size, sizes, NUMBERS))


def scalars(piece: PieceGraph, sizes: Sizes) -> dict[str, Any]:
    """Return a number for every parameter that is none of the sizes and no tensor, and the sizes themselves."""
    fixed = {"float": 0.5, "bool": True}
    found = {n: fixed.get(s.kind, _DATA_SIZE) for n, s in piece.parameters if isinstance(s, ScalarSpec)}
    return {**found, **{name: size for name, size in sizes.items() if name in found}}


def layout_of(spec: TensorSpec, numbers: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a parameter."""
    shape = tuple(size_of(size, numbers) for size in spec.shape)
    stride = contiguous_stride(shape) if spec.stride is None else tuple(size_of(s, numbers) for s in spec.stride)
    return shape, stride


def empty_inputs(piece: PieceGraph, sizes: Sizes) -> list[Any]:
    """Return inputs of the right layout on the meta device: without memory."""
    numbers = scalars(piece, sizes)
    return [
        numbers[name]
        if isinstance(spec, ScalarSpec)
        else torch.empty_strided(*layout_of(spec, numbers), dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in piece.parameters
    ]


class Source:
    """Draws one piece's inputs, the same in every process; weights are drawn once for all sizes.

    `weights` are the model's own where it has some, in the text's order. `is_positive` keeps floats above zero, for
    roots and logarithms; `most` bounds whole numbers further, where indices are computed from them.
    """

    def __init__(self, piece: PieceGraph, weights: Sequence[Tensor] | None = None) -> None:
        self.piece = piece
        self.is_positive = False
        self.most = 0
        self.independent: dict[str, bool] = {}
        self._own = weights
        self._weights: dict[str, Tensor] = {}
        self._kind = (self.is_positive, self.most)  # what the weights were drawn for

    @property
    def is_drawn(self) -> bool:
        """Whether weights are drawn too."""
        return self._own is None

    def draw(self, sizes: Sizes, seed: int = 0) -> list[Any]:
        """Return a value for every parameter in the text's order."""
        numbers = scalars(self.piece, sizes)
        bounds = self._bounds(sizes)
        generator = torch.Generator().manual_seed(seed)
        own = iter(self._own) if self._own is not None else None
        values: list[Any] = []
        for position, (name, spec) in enumerate(self.piece.parameters):
            if isinstance(spec, ScalarSpec):
                values.append(numbers[name])
            elif spec.is_weight:
                values.append(next(own) if own is not None else self._weight(name, spec, bounds.get(name), position))
            else:
                values.append(self._tensor(spec, layout_of(spec, numbers), bounds.get(name), generator))
        return values

    def _bounds(self, sizes: Sizes) -> dict[str, int]:
        whole = [s for _, s in self.piece.parameters if isinstance(s, TensorSpec) and "int" in s.dtype]
        return index_bounds(self.piece, layouts(self.piece, empty_inputs(self.piece, sizes))[0]) if whole else {}

    def _weight(self, name: str, spec: TensorSpec, bound: int | None, position: int) -> Tensor:
        if self._kind != (self.is_positive, self.most):
            self._kind = (self.is_positive, self.most)
            self._weights.clear()
        if name not in self._weights:
            generator = torch.Generator().manual_seed(1000 + position)
            shape, stride = layout_of(spec, {})
            if _is_large_on_gpu(spec):
                # Each begins elsewhere, so that weights of one shape are not equal.
                self._weights[name] = self._shared(spec, generator).as_strided(shape, stride, _APART * position)
            else:
                self._weights[name] = self._tensor(spec, (shape, stride), bound, generator)
        return self._weights[name]

    def _shared(self, spec: TensorSpec, generator: torch.Generator) -> Tensor:
        """Return memory in which all large weights of a dtype lie, one over the other: together they may fill a GPU.

        Tensors:
            ->  [N]  model
        """
        name = f"large {spec.dtype} {spec.device}"
        if name not in self._weights:
            every = [s for _, s in self.piece.parameters if isinstance(s, TensorSpec) and _is_large_on_gpu(s)]
            alike = [s for s in every if (s.dtype, s.device) == (spec.dtype, spec.device)]
            largest = max(alike, key=_extent_of)
            count = _extent_of(largest) + _APART * len(self.piece.parameters)
            flat = self._flat(largest, count, layout_of(largest, {})[0], None, generator)
            self._weights[name] = flat.to(spec.device)
        return self._weights[name]

    def _tensor(
        self,
        spec: TensorSpec,
        layout: tuple[tuple[int, ...], tuple[int, ...]],
        bound: int | None,
        generator: torch.Generator,
    ) -> Tensor:
        shape, stride = layout
        flat = self._flat(spec, _extent(shape, stride), shape, bound, generator)
        return flat.to(spec.device).as_strided(shape, stride)

    def _flat(
        self, spec: TensorSpec, count: int, shape: Sequence[int], bound: int | None, generator: torch.Generator
    ) -> Tensor:
        dtype = getattr(torch, spec.dtype)
        if dtype is torch.bool:
            return torch.randint(0, 2, (count,), generator=generator).bool()
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.float32 if dtype.itemsize < 4 else dtype
            drawn = torch.randn(count, generator=generator, dtype=wide)
            if self.is_positive and not dtype.is_complex:
                drawn = drawn.abs_().add_(0.5)
            if spec.is_weight and len(shape) > 1:
                # A product of many rows with such a matrix is as large as its rows, so that half floats hold it.
                drawn.mul_(max(1, shape[-1]) ** -0.5)
            return drawn.to(dtype)
        if bound is None and spec.is_weight and dtype in _PACKED and not self.most:
            limits = torch.iinfo(dtype)
            return torch.randint(limits.min, limits.max + 1, (count,), generator=generator).to(dtype)
        high = min(bound if bound is not None else _SMALL, self.most or 1 << 30)
        return torch.randint(0, max(1, high), (count,), generator=generator).to(dtype)


def _is_large_on_gpu(spec: TensorSpec) -> bool:
    dtype = getattr(torch, spec.dtype)
    is_drawn = spec.is_weight and spec.device != "cpu" and dtype.is_floating_point
    return is_drawn and _extent_of(spec) * dtype.itemsize >= _LARGE


def _extent_of(weight: TensorSpec) -> int:
    return _extent(*layout_of(weight, {}))


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of memory a layout spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def index_bounds(piece: PieceGraph, shapes: Mapping[str, Layout]) -> dict[str, int]:
    """Return for each whole-number parameter that indexes something the smallest size that it indexes."""
    bounds: dict[str, int] = {}
    for node in piece.graph.nodes:
        for index, bound in _uses(node, shapes):
            for name in _origins(index, shapes):
                bounds[name] = min(bound, bounds.get(name, bound))
    return bounds


def _uses(node: fx.Node, shapes: Mapping[str, Layout]) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes by which a call indexes, with the size of what each indexes."""
    name, arguments = call_name(node), list(node.args)

    def shape(place: Any) -> tuple[int, ...]:
        known = shapes.get(place.name) if isinstance(place, fx.Node) else None
        return known.shape if known is not None else ()

    if name in ("embedding", "embedding_bag") and len(arguments) > 1:
        is_aten = len(shape(arguments[0])) == 2 and _is_float(arguments[0], shapes)
        table, index = (arguments[0], arguments[1]) if is_aten else (arguments[1], arguments[0])
        if isinstance(index, fx.Node) and shape(table):
            yield index, shape(table)[0]
    elif name in ("getitem", "setitem", "__getitem__", "__setitem__") and shape(arguments[0]):
        yield from _subscripts(arguments[1], shape(arguments[0]), shapes)
    elif name in ("index", "index_put", "index_put_") and isinstance(arguments[1], list | tuple):
        yield from _subscripts(tuple(arguments[1]), shape(arguments[0]), shapes)
    elif name in _BY_DIMENSION and len(arguments) > 2 and isinstance(arguments[2], fx.Node) and shape(arguments[0]):
        yield arguments[2], shape(arguments[0])[arguments[1]]  # type: ignore[index]
    elif name == "take" and isinstance(arguments[1], fx.Node) and shape(arguments[0]):
        yield arguments[1], int(torch.Size(shape(arguments[0])).numel())
    elif name == "one_hot" and len(arguments) > 1 and isinstance(arguments[1], int):
        yield arguments[0], arguments[1]  # type: ignore[misc]


def _is_float(node: Any, shapes: Mapping[str, Layout]) -> bool:
    known = shapes.get(node.name) if isinstance(node, fx.Node) else None
    return known is not None and known.dtype.is_floating_point


def _subscripts(index: Any, shape: Sequence[int], shapes: Mapping[str, Layout]) -> Iterator[tuple[fx.Node, int]]:
    items = list(index) if isinstance(index, tuple | list) else [index]
    taken = sum(item is not None and item is not ... for item in items)
    dim = 0
    for item in items:
        if item is ...:
            dim += len(shape) - taken
        elif isinstance(item, fx.Node):
            known = shapes.get(item.name)
            is_mask = known is not None and known.dtype is torch.bool
            if not is_mask and dim < len(shape):
                yield item, shape[dim]
            dim += len(known.shape) if known is not None and is_mask else 1
        elif item is not None:
            dim += 1


def _origins(index: fx.Node, shapes: Mapping[str, Layout]) -> set[str]:
    """Return the parameters from which whole numbers flow to a node."""
    found, waiting, seen = set(), [index], set()
    while waiting:
        node = waiting.pop()
        known = shapes.get(node.name)
        if node in seen or (known is not None and (known.dtype.is_floating_point or known.dtype is torch.bool)):
            continue
        seen.add(node)
        if node.op == "placeholder":
            found.add(node.name)
        waiting.extend(node.all_input_nodes)
    return found
