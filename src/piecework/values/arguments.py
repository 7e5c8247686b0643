"""The caller's arguments: bound to forward's names, flattened to leaves, their dynamic dimensions found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework.errors import GuardError, OptionError
from piecework.values.declaration import ATTRIBUTE, Declaration, Dim, Dynamic
from piecework.values.graph import SymbolSource
from piecework.values.shapes import Range
from piecework.values.signature import BY_NAME
from piecework.values.tree import children, containers, leaves, map_leaves

_PRIMES = (13, 11, 7, 17, 19, 23, 29, 31, 37, 41)
_WIDEST = 1 << 20


@dataclass(frozen=True)
class LeafDims:
    """The dynamic dimensions of one tensor leaf."""

    path: str
    dims: Mapping[int, Dim]


def bind_arguments(forward: Callable[..., Any], example: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the example arguments by forward's parameter names, in forward's order; `None` counts as absent."""
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(**example) if isinstance(example, Mapping) else signature.bind(*example)
    except TypeError as error:
        raise OptionError(
            f"example inputs do not fit `forward{signature}`: {error}",
            hint="give a tuple in forward's order, or a dictionary by its argument names",
        ) from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise OptionError(f"forward takes `*{name}`, which has no names", hint="give its arguments names")
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return {name: value for name, value in named.items() if value is not None}


def parameters_of(forward: Callable[..., Any], arguments: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Return forward's named parameters with those defaults that are plain data, then further traced arguments.

    A parameter named `*` stands before those that are given by name alone.
    """
    kinds, by_name = inspect.Parameter, False
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            continue
        if parameter.kind is kinds.KEYWORD_ONLY and not by_name:
            by_name, found[BY_NAME] = True, None
        default = parameter.default
        found[name] = default if isinstance(default, int | float | str | bool) else None
    further = [name for name in arguments if name not in found]
    if further and not by_name:
        found[BY_NAME] = None
    return (*found.items(), *((name, None) for name in further))


def declared_dynamic(model: Any, dynamic: Dynamic | None) -> Dynamic:
    """Return `dynamic` where it is given, else what the model's class declares."""
    if dynamic is not None:
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        for name in () if takes_any else dynamic:
            if name not in parameters:
                raise OptionError(
                    f"`dynamic` names `{name}`, which forward does not take",
                    hint=f"forward takes {', '.join(f'`{one}`' for one in parameters)}",
                )
        return dynamic
    declaration = getattr(type(model), ATTRIBUTE, None)
    return declaration.dynamic if isinstance(declaration, Declaration) else {}


def dynamic_leaves(arguments: Mapping[str, Any], dynamic: Dynamic) -> tuple[LeafDims, ...]:
    """Find the tensor leaves that `dynamic` speaks of, with their dimensions counted from the front."""
    found: list[LeafDims] = []
    for name, rule in dynamic.items():
        if name in arguments:
            found.extend(_apply_rule(name, arguments[name], rule))
    return (*found, *_of_one_tensor(arguments, found))


def _of_one_tensor(arguments: Mapping[str, Any], found: Sequence[LeafDims]) -> Iterator[LeafDims]:
    """Yield the further places of tensors whose dimensions are declared in one place: they are one tensor."""
    every = [(path, leaf) for name, value in arguments.items() for path, leaf in leaves(value, name)]
    known = {leaf.path for leaf in found}
    dims = {id(tensor): leaf.dims for leaf in found for path, tensor in every if path == leaf.path}
    yield from (LeafDims(path, dims[id(leaf)]) for path, leaf in every if path not in known and id(leaf) in dims)


def _apply_rule(path: str, value: Any, rule: Mapping[Any, Any]) -> Iterator[LeafDims]:
    if not isinstance(rule, Mapping):
        raise OptionError(f"`dynamic` for `{path}` is `{rule!r}`", hint='write `{dim: name}`, as in {0: "tokens"}')
    if value is None:
        return
    if all(isinstance(mark, str | Dim) for mark in rule.values()):
        for leaf_path, leaf in leaves(value, path):
            if isinstance(leaf, torch.Tensor):
                yield LeafDims(leaf_path, {_front(leaf_path, leaf, dim): _dim(mark) for dim, mark in rule.items()})
        return
    inner = {key: (child_path, child) for child_path, key, child in children(value, path) or ()}
    for key, nested in rule.items():
        if key in inner:
            yield from _apply_rule(*inner[key], nested)
        elif isinstance(value, torch.Tensor) or not inner:
            raise OptionError(f"`dynamic` reaches for `{key!r}` in `{path}`, which has no members")


def _dim(mark: str | Dim) -> Dim:
    return mark if isinstance(mark, Dim) else Dim(mark)


def _front(path: str, tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise OptionError(
            f"`dynamic` names dimension `{dim}` of `{path}`, which has `{tensor.dim()}`",
            hint="dimensions count from 0, or from -1 at the end",
        )
    return dim % tensor.dim()


def symbol_sources(dims: Sequence[LeafDims]) -> tuple[SymbolSource, ...]:
    """Return each declared name once: where its size is read, and every further place that must agree."""
    places: dict[str, list[tuple[str, int]]] = {}
    marks: dict[str, Dim] = {}
    for leaf in dims:
        for dim, mark in leaf.dims.items():
            places.setdefault(mark.name, []).append((leaf.path, dim))
            known = marks.setdefault(mark.name, mark)
            if known != mark:
                raise OptionError(
                    f"dimension `{mark.name}` is declared as `{known}` and as `{mark}`",
                    hint="declare a name the same way everywhere, or give the second a name of its own",
                )
    return tuple(SymbolSource(n, marks[n].kind, tuple(p), marks[n].low, marks[n].high) for n, p in places.items())


def trace_sizes(names: Sequence[str], bounds: Mapping[str, Range], shift: int) -> dict[str, int]:
    """Choose one size for each name inside its bounds: distinct, never 0, and 1 only where nothing else is left.

    Primes where there are any, so that no two sizes and no product agree by chance. Another `shift` gives
    other sizes, where the bounds leave some.
    """
    chosen: dict[str, int] = {}
    for name in sorted(names):
        bound = bounds.get(name, Range(1, _WIDEST))
        taken = set(chosen.values())
        free = [size for size in _candidates(bound) if size not in taken] or [bound.high]
        chosen[name] = free[(shift * (1 + len(free) // 2)) % len(free)]
    return chosen


def _candidates(bound: Range) -> list[int]:
    primes = [size for size in _PRIMES if size in bound]
    if len(primes) > 1:
        return primes
    low = max(2, bound.low)
    near = [size for size in range(low, min(bound.high, low + 64) + 1) if all(size % p for p in (2, 3, 5, 7))]
    every = range(min(low, bound.high), min(bound.high, low + 8) + 1)
    return list(dict.fromkeys([*primes, *near, *every]))


def resize(arguments: Mapping[str, Any], dims: Sequence[LeafDims], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Copy the arguments with every dynamic dimension at its chosen size.

    Rows are taken from the example in turn, so that index tensors keep valid values; an example of size 0
    is filled with zeros. A tensor that stands in two places stays one tensor.
    """
    by_path = {leaf.path: leaf.dims for leaf in dims}
    copies: dict[int, torch.Tensor] = {}

    def copy(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = _resize(leaf, {dim: sizes[mark.name] for dim, mark in by_path.get(path, {}).items()})
        return copies[id(leaf)]

    return {name: map_leaves(copy, value, name) for name, value in arguments.items()}


def _resize(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    result = tensor.detach()
    if not sizes:
        return result.view_as(result)
    for dim, size in sizes.items():
        rows = tensor.shape[dim]
        if rows == 0:
            shape = [*result.shape[:dim], size, *result.shape[dim + 1 :]]
            result = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        else:
            result = result.index_select(dim, torch.arange(size, device=tensor.device) % rows)
    return _lay_out_like(tensor, result)


def _lay_out_like(example: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Give a resized copy the example's order of dimensions in memory, so that its layout is what is traced."""
    if example.is_contiguous() or 0 in example.stride():
        return tensor.contiguous()
    order = sorted(range(example.dim()), key=lambda dim: example.stride(dim))
    stride, step = [0] * example.dim(), 1
    for dim in order:
        stride[dim], step = step, step * tensor.shape[dim]
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def check_leaves(inputs: Sequence[tuple[str, Any]]) -> None:
    """Raise where an argument holds what a program cannot be given."""
    for path, leaf in inputs:
        if not (leaf is None or isinstance(leaf, torch.Tensor | int | float | str)):
            raise OptionError(
                f"argument `{path}` is a `{type(leaf).__name__}`, which a program cannot be given",
                hint="pass tensors, numbers and strings, in tuples, lists, dictionaries or dataclasses",
                facts={"argument": path},
            )


def linked_sizes(arguments: Mapping[str, Any], dims: Sequence[LeafDims]) -> dict[str, int]:
    """Return the example's size of each name; raise where one name has two."""
    tensors = {path: leaf for name, value in arguments.items() for path, leaf in leaves(value, name)}
    seen: dict[str, tuple[int, str]] = {}
    for leaf in dims:
        for dim, mark in leaf.dims.items():
            size, place = tensors[leaf.path].shape[dim], f"{leaf.path}.shape[{dim}]"
            known = seen.setdefault(mark.name, (size, place))
            if known[0] != size:
                raise GuardError(
                    f"dimension `{mark.name}` is `{known[0]}` at `{known[1]}` and `{size}` at `{place}`",
                    hint="dimensions of one name have one size; give the second a name of its own",
                )
    return {name: size for name, (size, _) in seen.items()}


def describe_pattern(arguments: Mapping[str, Any], dims: Sequence[LeafDims]) -> list[list[str]]:
    """Return the presence pattern of the arguments as plain data for keys: paths, dtypes, sizes by name."""
    by_path = {leaf.path: leaf.dims for leaf in dims}
    first: dict[int, str] = {}
    nested = [pair for name, value in arguments.items() for pair in containers(value, name)]
    rows = [[path, "container", repr(keys)] for path, keys in nested]
    for path, leaf in ((p, leaf) for name, value in arguments.items() for p, leaf in leaves(value, name)):
        if not isinstance(leaf, torch.Tensor):
            rows.append([path, type(leaf).__name__, repr(leaf)])
            continue
        marks = by_path.get(path, {})
        sizes = [f"{marks[d].name}:{marks[d].kind}" if d in marks else str(n) for d, n in enumerate(leaf.shape)]
        layout = "contiguous" if leaf.is_contiguous() else str(sorted(range(leaf.dim()), key=lambda d: leaf.stride(d)))
        shared = first.setdefault(id(leaf), path)
        rows.append(
            [path, str(leaf.dtype), ",".join(sizes), layout, leaf.device.type, shared if shared != path else ""]
        )
    return rows
