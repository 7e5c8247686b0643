"""Make a piece compilable: its text and a box become a graph with fake inputs on a shape environment of its own.

Each (piece, box) gets a fresh environment: what a compile assumes of a size narrows the environment, and
one that is shared would make every result depend on what was compiled before it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from piecework.errors import CompileError
from piecework.seam.fx import PieceGraph, parse_piece
from piecework.values.shapes import Box, Range, format_box
from piecework.values.signature import ScalarSpec, Size, Spec, TensorSpec, contiguous_stride
from piecework.values.syntax import parse_python

_TYPICAL_SIZE = 16
_WIDE = 4096
# What a size in a text may call, on plain and on symbolic numbers.
_MATH = SimpleNamespace(floor=math.floor, ceil=math.ceil, trunc=math.trunc, sqrt=torch.sym_sqrt)
_SYMBOLIC = ("sym_float", "sym_int", "sym_max", "sym_min", "sym_sqrt", "_sym_sqrt", "_sym_log2")
_TORCH = SimpleNamespace(**{name: getattr(torch, name) for name in _SYMBOLIC if hasattr(torch, name)})
_SIZE_FUNCTIONS = {
    "max": torch.sym_max, "min": torch.sym_min, "int": torch.sym_int, "float": torch.sym_float, "abs": abs,
    "round": round, "math": _MATH, "torch": _TORCH,
}  # fmt: skip


@dataclass(frozen=True)
class RebuiltPiece:
    """A piece ready for the compiler; `inputs` follow `names`, the parameters of the text in order."""

    names: tuple[str, ...]
    specs: tuple[Spec, ...]
    module: fx.GraphModule
    inputs: tuple[Any, ...]
    mode: Any
    shape_env: Any
    symbols: Mapping[str, str]
    hints: Mapping[str, int]

    @property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.tensor_specs.items() if spec.is_weight)

    @property
    def tensor_specs(self) -> dict[str, TensorSpec]:
        """What the piece takes, but for numbers."""
        pairs = zip(self.names, self.specs, strict=True)
        return {name: spec for name, spec in pairs if isinstance(spec, TensorSpec)}

    @property
    def call_names(self) -> tuple[str, ...]:
        """The parameters that arrive with each call: symbols and activations."""
        weights = set(self.weight_names)
        return tuple(name for name in self.names if name not in weights)

    @property
    def results(self) -> tuple[Any, ...]:
        """What the piece gives, as fakes: their strides are what the next region was promised."""
        given: Any = self.module.graph.output_node().args[0]
        return tuple(node.meta["example_value"] if isinstance(node, fx.Node) else node for node in given)


def hint_for(size: Range) -> int:
    """Choose the size that stands for a range when the compiler weighs costs.

    Never 0 or 1, which the compiler takes for special cases. Narrow ranges are judged at 16 tokens (decode);
    ranges that begin above that at their geometric middle.
    """
    if size.is_single:
        return size.low
    low = max(2, size.low)
    if low <= _TYPICAL_SIZE <= size.high:
        return _TYPICAL_SIZE
    if size.high < _TYPICAL_SIZE:
        return size.high
    return max(low, min(size.high, int((low * min(size.high, _WIDE * low)) ** 0.5)))


def rebuild_piece(text: str, box: Box) -> RebuiltPiece:
    """Rebuild the graph of `text` with fake inputs whose sizes range over `box`.

    A symbol whose range is one size is that constant everywhere. Every node gets `meta["example_value"]`.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    piece = parse_piece(text)
    _leave_out_dropout(piece.graph)
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    sizes, symbols, hints = _make_symbols(piece, box, shape_env)
    inputs = tuple(_make_input(name, spec, sizes, mode) for name, spec in piece.parameters)
    module = fx.GraphModule({}, piece.graph)
    try:
        # An operator that C++ composes may ask for sizes as numbers (`matmul`, torch 2.11); its Python form does not.
        with mode, torch.no_grad(), enable_python_dispatcher(), shape_env.ignore_fresh_unbacked_symbols():
            # On inputs of its own: a piece that changes an input's shape would hand the compiler the changed one.
            _Annotator(module).run(*(_make_input(name, spec, sizes, mode) for name, spec in piece.parameters))
    except Exception as error:
        raise CompileError(
            f"a piece does not run on sizes of range `{format_box(box)}`: `{str(error).splitlines()[0][:300]}`",
            hint="declare the range so that every operator of the model accepts its sizes",
            facts={"box": format_box(box), "error": str(error)},
        ) from error
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["example_value"] = value
    names, specs = zip(*piece.parameters, strict=True) if piece.parameters else ((), ())
    return RebuiltPiece(names, specs, module, inputs, mode, shape_env, symbols, hints)


def _leave_out_dropout(graph: fx.Graph) -> None:
    """Put its argument in the place of dropout that is off, which is what it gives.

    The compiler writes it as a copy, which another memory than the model's is, and which a later write misses.
    """
    for node in graph.find_nodes(op="call_function", target=torch.nn.functional.dropout):
        words: dict[str, Any] = dict(zip(("p", "training"), node.args[1:], strict=False)) | dict(node.kwargs)
        if node.args and words.get("training", True) is False:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


class _Annotator(fx.Interpreter):
    """Run a graph once on fakes and leave each node's value in its meta."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = value
        return value


def _make_symbols(piece: PieceGraph, box: Box, shape_env: Any) -> tuple[dict[str, Any], dict[str, str], dict[str, int]]:
    sizes: dict[str, Any] = {}
    hints: dict[str, int] = {}
    for name, spec in piece.parameters:
        if not (isinstance(spec, ScalarSpec) and spec.kind in ("int", "int unbacked")):
            continue
        if spec.is_unbacked:
            sizes[name] = _unbacked(name, piece, box, shape_env)
        elif name in box or name.startswith("s"):
            if name not in box:
                raise CompileError(f"no range is given for symbol `{name}`: the box is `{format_box(box)}`")
            hints[name] = hint_for(box[name])
            sizes[name] = hints[name] if box[name].is_single else _backed(name, box[name], hints[name], shape_env)
        else:
            hints[name] = _TYPICAL_SIZE
            sizes[name] = _scalar_int(name, shape_env)
    for name in sorted(_sizes_of(piece) - set(dict(piece.parameters))):
        # An opaque operator's data decides it and nothing else asks for it: it arrives with the tensor alone.
        sizes[name] = _unbacked(name, piece, box, shape_env)
    symbols = {str(size.node.expr): name for name, size in sizes.items() if isinstance(size, torch.SymInt)}
    return sizes, symbols, hints


def _backed(name: str, size: Range, hint: int, shape_env: Any) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    # What the environment takes for granted (2 <= size) is kept: a range that holds size 1 is refused by its guard.
    shape_env.constrain_symbol_range(symbol, compiler_min=max(2, size.low), compiler_max=size.high)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)


def _scalar_int(name: str, shape_env: Any) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(
        _TYPICAL_SIZE,
        source=source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=None,
        positive=None,
        do_not_specialize_zero_one=True,
    )
    return shape_env.create_symintnode(symbol, hint=_TYPICAL_SIZE, source=source)


def _unbacked(name: str, piece: PieceGraph, box: Box, shape_env: Any) -> Any:
    with shape_env.ignore_fresh_unbacked_symbols():
        value = shape_env.create_unbacked_symint()
    is_size = name in _sizes_of(piece)
    low, high = (box[name].low, box[name].high) if name in box else (0, None)
    if is_size or name in box:
        shape_env._constrain_range_for_size(value.node.expr, low if name in box else None, high)
    return value


def _sizes_of(piece: PieceGraph) -> set[str]:
    shapes = [spec.shape for _, spec in piece.parameters if isinstance(spec, TensorSpec)]
    names = {name for shape in shapes for size in shape if isinstance(size, str) for name in _names_in(size)}
    return names - set(_SIZE_FUNCTIONS)


def _names_in(expression: str) -> set[str]:
    return {node.id for node in ast.walk(parse_python(expression, "eval")) if isinstance(node, ast.Name)}


def _make_input(name: str, spec: Spec, sizes: Mapping[str, Any], mode: Any) -> Any:
    if isinstance(spec, ScalarSpec):
        if name in sizes:
            return sizes[name]
        raise CompileError(
            f"parameter `{name}` is a `{spec.kind}` that varies from call to call, which does not compile",
            hint="make the number a tensor, or run this piece with the eager compiler",
        )
    shape = [size_at(size, sizes) for size in spec.shape]
    stride = _contiguous(shape) if spec.stride is None else [size_at(size, sizes) for size in spec.stride]
    with mode:
        return torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype), device=spec.device)


def _contiguous(shape: list[Any]) -> tuple[Any, ...]:
    """Return contiguous strides; a symbolic size is never taken for 0, which would ask the environment."""
    return contiguous_stride(shape) if all(type(size) is int for size in shape) else _symbolic_stride(shape)


def _symbolic_stride(shape: list[Any]) -> tuple[Any, ...]:
    stride: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        stride.append(step)
        step = step * (max(size, 1) if type(size) is int else size)
    return tuple(reversed(stride))


def size_at(size: Size, sizes: Mapping[str, Any]) -> Any:
    """Return what a size is where its names have these values."""
    if isinstance(size, int):
        return size
    return eval(compile(size, "<size>", "eval"), {"__builtins__": {}, **_SIZE_FUNCTIONS}, dict(sizes))
