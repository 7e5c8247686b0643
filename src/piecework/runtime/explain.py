"""What a call is checked against, and the slow path of the check: it names what does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecework.errors import InputError, ShapeOutOfRange
from piecework.values.overlap import is_overlapping
from piecework.values.shapes import Range
from piecework.values.signature import Spec, TensorSpec
from piecework.values.tree import leaves


@dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments: its path, its name in the code, its spec or the constant it must equal."""

    path: str
    name: str
    spec: Spec | None
    value: Any
    same_as: str
    is_written: bool
    is_read: bool = True


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that a program reads where it lies: a weight, a buffer, a constant, by the model's name for it."""

    kind: str
    name: str
    tensor: torch.Tensor
    is_written: bool


@dataclass(frozen=True)
class Checked:
    """What a call is checked against, beside its leaves.

    `parameters` are forward's names with their defaults, `arguments` those that the trace was given,
    `symbols` map a name to its places (path, dim) and ranges, `passed` are the names handed to `run`, `bounds` the
    sizes that all sides serve together, `containers` the keys or the length of each nested argument, `rivals` the
    tensors of the program's own whose memory an argument may not share.
    """

    parameters: tuple[tuple[str, Any], ...]
    arguments: tuple[str, ...]
    symbols: Mapping[str, tuple[tuple[Any, ...], Sequence[Range]]]
    passed: tuple[str, ...]
    on_cuda: bool
    bounds: Mapping[str, Range] = field(default_factory=dict)
    containers: tuple[tuple[str, Any], ...] = ()
    rivals: tuple[Held, ...] = ()


def rivals_of(leaves: Sequence[Leaf], held: Sequence[Held]) -> tuple[Held, ...]:
    """Return the tensors that no argument may overlap: those that are written, or all where an argument is written."""
    return tuple(held) if any(leaf.is_written for leaf in leaves) else tuple(one for one in held if one.is_written)


def out_of_range_error(checked: Checked) -> Callable[[str, int], None]:
    """Return the function that raises ShapeOutOfRange for a dimension and a size."""

    def out_of_range(name: str, size: int) -> None:
        served = _served(checked, name)
        raise ShapeOutOfRange(
            f"dimension `{name}` is `{size}`; the program serves `{served.low}` to `{served.high}`",
            hint="compile with ranges that hold this size, or split the batch",
            facts={"dimension": name, "size": size, "low": served.low, "high": served.high},
        )

    return out_of_range


def _served(checked: Checked, name: str) -> Range:
    ranges = checked.symbols[name][1]
    return checked.bounds.get(name) or Range(ranges[0].low, ranges[-1].high)


def refuse_argument(name: str, value: Any, default: Any) -> None:
    """Raise for an argument that the trace was not given, unless it is forward's default."""
    if isinstance(value, torch.Tensor) or type(value) is not type(default) or value != default:
        raise InputError(
            f"argument `{name}` was not given when the program was traced",
            hint=f"leave `{name}` out, or compile with an example that gives it",
            facts={"argument": name},
        )


def refuse_gradient(**arguments: Any) -> None:
    """Raise for an argument that wants a gradient: a program computes none, and would cut it off silently."""
    wants = (
        path
        for name, value in arguments.items()
        for path, leaf in leaves(value, name)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    )
    path = next(wants, "")
    raise InputError(
        f"argument `{path}` requires a gradient, and a program computes none",
        hint="call it under `torch.no_grad()`, or pass `.detach()`; to train, call the model itself",
        facts={"argument": path},
    )


def make_explainer(leaves: Sequence[Leaf], checked: Checked) -> Callable[[Mapping[str, Any]], None]:
    """Return the function that is shown the arguments of a call that the fast path did not take."""

    def explain(arguments: Mapping[str, Any]) -> None:
        """Raise the error that names what does not fit; return if a tensor is only of another, harmless class."""
        _refuse_autocast(leaves)
        seen: dict[str, tuple[int, str]] = {}
        tensors: dict[str, torch.Tensor] = {}
        for leaf in leaves:
            value = _reach(leaf.path, arguments)
            if leaf.spec is None:
                if type(value) is not type(leaf.value) or repr(value) != repr(leaf.value):
                    raise InputError(
                        f"argument `{leaf.path}` is `{value!r}`, the program was traced with `{leaf.value!r}`",
                        hint="compile another program for this value",
                    )
                continue
            if not isinstance(leaf.spec, TensorSpec):
                continue
            _check_tensor(leaf, leaf.spec, value, seen, checked)
            tensors[leaf.path] = value
        _check_containers(checked, arguments)
        _check_sharing(leaves, tensors, checked.rivals)

    return explain


def _refuse_autocast(leaves: Sequence[Leaf]) -> None:
    for device in dict.fromkeys(leaf.spec.device for leaf in leaves if isinstance(leaf.spec, TensorSpec)):
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            raise InputError(
                f"`torch.autocast` to `{dtype}` is on round the call, and was not round the trace",
                hint=f"call the program outside it; enter it inside forward, or compile `model.to(torch.{dtype})`",
                facts={"device": device, "dtype": dtype},
            )


def _check_containers(checked: Checked, arguments: Mapping[str, Any]) -> None:
    for path, keys in checked.containers:
        value = _reach(path, arguments)
        if isinstance(keys, int):
            if len(value) != keys:
                raise InputError(
                    f"argument `{path}` holds `{len(value)}` items, the program was traced with `{keys}`",
                    hint="compile with an example of this length",
                )
        elif unknown := [key for key in value if key not in keys]:
            raise InputError(
                f"argument `{path}[{unknown[0]!r}]` was not given when the program was traced",
                hint="leave it out, or compile with an example that gives it",
                facts={"argument": f"{path}[{unknown[0]!r}]"},
            )


def _reach(path: str, arguments: Mapping[str, Any]) -> Any:
    root = path.split("[")[0].split(".")[0]
    try:
        return eval(path, {"__builtins__": {}}, {root: arguments[root]})
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InputError(
            f"argument `{path}` is missing", hint="give every input that the program was traced with"
        ) from error


def _check_tensor(leaf: Leaf, spec: TensorSpec, value: Any, seen: dict[str, tuple[int, str]], checked: Checked) -> None:
    if value is None:
        raise InputError(
            f"argument `{leaf.path}` is missing",
            hint="give every input that the program was traced with",
            facts={"argument": leaf.path},
        )
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise InputError(
            f"argument `{leaf.path}` is a `{type(value).__name__}`, not a plain tensor",
            hint="convert it to torch.Tensor",
        )

    def refuse(what: str, expected: object, got: object, hint: str, how: str = "was traced with") -> InputError:
        return InputError(
            f"argument `{leaf.path}` has {what} `{got}`, the program {how} `{expected}`",
            hint=hint,
            facts={"argument": leaf.path, "expected": str(expected), "got": str(got)},
        )

    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise refuse("layout", "strided", layout, "give a dense tensor, as `.to_dense()` makes it", "takes")
    if str(value.dtype) != f"torch.{spec.dtype}":
        raise refuse(
            "dtype", spec.dtype, str(value.dtype).removeprefix("torch."), f"convert it with .to(torch.{spec.dtype})"
        )
    if value.device.type != spec.device:
        raise refuse("device", spec.device, value.device.type, f"move it to {spec.device}")
    if value.dim() != len(spec.shape):
        shape = f"[{', '.join(map(str, spec.shape))}]"
        raise refuse("shape", shape, list(value.shape), "give as many dimensions as at the trace")
    for dim, expected in enumerate(spec.shape):
        got = value.shape[dim]
        if isinstance(expected, str) and expected in checked.symbols:
            known, place = seen.setdefault(expected, (got, f"{leaf.path}.shape[{dim}]"))
            if known != got:
                raise InputError(
                    f"dimension `{expected}` is `{known}` at `{place}` and `{got}` at `{leaf.path}.shape[{dim}]`",
                    hint="dimensions of one name have one size",
                    facts={"argument": leaf.path, "expected": str(known), "got": str(got)},
                )
            if got not in _served(checked, expected):
                out_of_range_error(checked)(expected, got)
        elif isinstance(expected, int) and expected != got:
            raise refuse(f"size of dimension `{dim}`", expected, got, "declare the dimension dynamic to vary it")
    _check_stride(spec, value, {name: size for name, (size, _) in seen.items()}, refuse)


def _check_stride(
    spec: TensorSpec, value: torch.Tensor, seen: Mapping[str, int], refuse: Callable[..., InputError]
) -> None:
    if spec.stride is None:
        if not value.is_contiguous():
            raise refuse("strides", "contiguous", list(value.stride()), "call .contiguous() on it", "takes")
        return
    wanted = tuple(
        size if isinstance(size, int) else eval(size, {"max": max, "min": min}, dict(seen)) for size in spec.stride
    )
    counted = [d for d, size in enumerate(value.shape) if size > 1]  # no element depends on the others
    if any(value.stride(d) != wanted[d] for d in counted):
        raise refuse("strides", list(wanted), list(value.stride()), "lay it out as at the trace", "takes at this size")


def _check_sharing(leaves: Sequence[Leaf], tensors: Mapping[str, torch.Tensor], rivals: Sequence[Held]) -> None:
    for leaf in leaves:
        if leaf.same_as and tensors[leaf.path] is not tensors[leaf.same_as]:
            raise InputError(
                f"arguments `{leaf.same_as}` and `{leaf.path}` were one tensor at the trace and are two now",
                hint="pass the same tensor, or compile with two",
            )
    own = [leaf for leaf in leaves if leaf.path in tensors and not leaf.same_as and leaf.is_read]
    for one, two in itertools.combinations(own, 2):
        if (one.is_written or two.is_written) and is_overlapping(tensors[one.path], tensors[two.path]):
            raise InputError(
                f"arguments `{one.path}` and `{two.path}` share memory, and the model writes to an input",
                hint="pass a copy",
            )
    for leaf, held in itertools.product(own, rivals):
        if (leaf.is_written or held.is_written) and is_overlapping(tensors[leaf.path], held.tensor):
            raise InputError(
                f"argument `{leaf.path}` shares memory with the {held.kind} `{held.name}`, and the model writes to the "
                + (held.kind if held.is_written else "argument"),
                hint="pass a copy",
                facts={"argument": leaf.path, held.kind: held.name},
            )
