"""The check that every call passes: generated straight-line Python, and the slow path that explains.

The fast path compares type, dtype, shape, layout and device of each tensor and looks the range up. What
it does not recognise goes to `explain`, which names what is wrong, or finds that nothing is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecework.errors import InputError, ShapeOutOfRange
from piecework.values.shapes import Range
from piecework.values.signature import Spec, TensorSpec


@dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments: its path, its name in the code, its spec or the constant it must equal."""

    path: str
    name: str
    spec: Spec | None
    value: Any
    same_as: str
    is_written: bool


@dataclass(frozen=True)
class Checked:
    """What a call is checked against, beside its leaves.

    `parameters` are forward's names with their defaults, `arguments` those that the trace was given,
    `symbols` map a name to its places (path, dim) and ranges, `passed` are the names handed to `run`.
    """

    parameters: tuple[tuple[str, Any], ...]
    arguments: tuple[str, ...]
    symbols: Mapping[str, tuple[tuple[Any, ...], Sequence[Range]]]
    passed: tuple[str, ...]
    on_cuda: bool


def compile_check(
    leaves: Sequence[Leaf], checked: Checked, runs: Sequence[Callable[..., Any]]
) -> tuple[Callable[..., Any], str]:
    """Return the function that checks a call, picks the run of its ranges and calls it; and its source."""
    constants = {leaf.path: leaf for leaf in leaves if leaf.spec is None}
    lines = [f"def call({', '.join(_parameter(name, checked, constants) for name, _ in checked.parameters)}):"]
    for name, default in checked.parameters:
        if name not in checked.arguments:
            lines.append(f"    if {name} is not None: refuse_argument({name!r}, {name}, {default!r})")
    lines += ["    try:"] + [f"        {leaf.name} = {leaf.path}" for leaf in leaves if leaf.name != leaf.path]
    tensors = [leaf for leaf in leaves if isinstance(leaf.spec, TensorSpec)]
    lines += [f"        {name} = {_place(places[0], leaves)}" for name, (places, _) in checked.symbols.items()]
    lines += ["    except (AttributeError, IndexError, KeyError, TypeError): explain(" + _all(leaves) + "); raise"]
    lines += [f"    if {_condition(tensors, leaves)}: explain({_all(leaves)})"]
    lines += _dispatch(checked)
    source = "\n".join(lines) + "\n"
    space: dict[str, Any] = {
        "T": torch.Tensor,
        "torch": torch,
        "runs": runs,
        "grad": torch.is_grad_enabled,
        "no_grad": torch.no_grad,
    }
    space |= {
        f"dtype_{name}": getattr(torch, name)
        for name in {leaf.spec.dtype for leaf in tensors if isinstance(leaf.spec, TensorSpec)}
    }
    space |= {f"table_{name}": _table(ranges) for name, (_, ranges) in checked.symbols.items()}
    space["explain"] = _explainer(leaves, checked)
    space["refuse_argument"] = _refuse_argument
    space["out_of_range"] = _out_of_range(checked)
    exec(compile(source, "<piecework signature>", "exec"), space)
    return space["call"], source


def _parameter(name: str, checked: Checked, constants: Mapping[str, Leaf]) -> str:
    if name in constants:
        return f"{name}={constants[name].value!r}"
    return name if name in checked.arguments and not _after_default(name, checked, constants) else f"{name}=None"


def _after_default(name: str, checked: Checked, constants: Mapping[str, Leaf]) -> bool:
    """Python wants no bare parameter after one with a default; such a one is checked as an argument all the same."""
    earlier = itertools.takewhile(lambda item: item[0] != name, checked.parameters)
    return any(other not in checked.arguments or other in constants for other, _ in earlier)


def _place(place: Sequence[Any], leaves: Sequence[Leaf]) -> str:
    path, dim = place
    name = next(leaf.name for leaf in leaves if leaf.path == path)
    return f"{name}.shape[{dim}]"


def _all(leaves: Sequence[Leaf]) -> str:
    """Write the dictionary of all leaves for the slow path: paths are read again there, one by one."""
    roots = dict.fromkeys(leaf.path.split("[")[0].split(".")[0] for leaf in leaves)
    return "{" + ", ".join(f"{root!r}: {root}" for root in roots) + "}"


def _condition(tensors: Sequence[Leaf], leaves: Sequence[Leaf]) -> str:
    parts: list[str] = []
    for leaf in tensors:
        spec = leaf.spec
        assert isinstance(spec, TensorSpec)
        shape = f"({', '.join(map(str, spec.shape))}{',' if len(spec.shape) == 1 else ''})"
        parts += [
            f"type({leaf.name}) is not T",
            f"{leaf.name}.shape != {shape}",
            f"{leaf.name}.dtype is not dtype_{spec.dtype}",
        ]
        parts.append(f"not {leaf.name}.is_{spec.device}")
        if spec.stride is None:
            parts.append(f"not {leaf.name}.is_contiguous()")
        else:
            parts.append(
                f"{leaf.name}.stride() != ({', '.join(map(str, spec.stride))}{',' if len(spec.stride) == 1 else ''})"
            )
        if leaf.same_as:
            parts.append(f"{leaf.name} is not {next(other.name for other in leaves if other.path == leaf.same_as)}")
    distinct = [leaf for leaf in tensors if not leaf.same_as]
    if len(distinct) > 1 and any(leaf.is_written for leaf in tensors):
        pointers = ", ".join(f"{leaf.name}.data_ptr()" for leaf in distinct)
        parts.append(f"len({{{pointers}}}) != {len(distinct)}")
    parts += [f"{leaf.name} != {leaf.value!r}" for leaf in leaves if leaf.spec is None]
    return " or ".join(parts) or "False"


def _dispatch(checked: Checked) -> list[str]:
    passed = ", ".join(checked.passed)
    index, lines = "0", []
    for name, (_, ranges) in checked.symbols.items():
        low, high = ranges[0].low, ranges[-1].high
        lines.append(f"    if not {low} <= {name} <= {high}: out_of_range({name!r}, {name})")
        index = f"table_{name}[{name}]" if index == "0" else f"({index}) * {len(ranges)} + table_{name}[{name}]"
    return [
        *lines,
        "    if grad():",
        f"        with no_grad(): return runs[{index}]({passed})",
        f"    return runs[{index}]({passed})",
    ]


def _table(ranges: Sequence[Range]) -> list[int]:
    """Return the range's number for every size, by direct look-up."""
    table = [0] * (ranges[-1].high + 1)
    for number, item in enumerate(ranges):
        table[item.low : item.high + 1] = [number] * (item.high - item.low + 1)
    return table


def _out_of_range(checked: Checked) -> Callable[[str, int], None]:
    def out_of_range(name: str, size: int) -> None:
        ranges = checked.symbols[name][1]
        raise ShapeOutOfRange(
            f"dimension `{name}` is `{size}`; the program serves `{ranges[0].low}` to `{ranges[-1].high}`",
            hint="compile with ranges that hold this size, or split the batch",
            facts={"dimension": name, "size": size, "low": ranges[0].low, "high": ranges[-1].high},
        )

    return out_of_range


def _refuse_argument(name: str, value: Any, default: Any) -> None:
    if isinstance(value, torch.Tensor) or value != default:
        raise InputError(
            f"argument `{name}` was not given when the program was traced",
            hint=f"leave `{name}` out, or compile with an example that gives it",
            facts={"argument": name},
        )


def _explainer(leaves: Sequence[Leaf], checked: Checked) -> Callable[[Mapping[str, Any]], None]:
    def explain(arguments: Mapping[str, Any]) -> None:
        """Raise the error that names what does not fit; return if a tensor is only of another, harmless class."""
        seen: dict[str, int] = {}
        tensors: dict[str, torch.Tensor] = {}
        for leaf in leaves:
            value = _reach(leaf.path, arguments)
            if leaf.spec is None:
                if value != leaf.value:
                    raise InputError(
                        f"argument `{leaf.path}` is `{value!r}`, the program was traced with `{leaf.value!r}`",
                        hint="compile another program for this value",
                    )
                continue
            if not isinstance(leaf.spec, TensorSpec):
                continue
            _check_tensor(leaf, leaf.spec, value, seen, checked)
            tensors[leaf.path] = value
        _check_sharing(leaves, tensors)

    return explain


def _reach(path: str, arguments: Mapping[str, Any]) -> Any:
    root = path.split("[")[0].split(".")[0]
    try:
        return eval(path, {"__builtins__": {}}, {root: arguments[root]})
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InputError(
            f"argument `{path}` is missing", hint="give every input that the program was traced with"
        ) from error


def _check_tensor(leaf: Leaf, spec: TensorSpec, value: Any, seen: dict[str, int], checked: Checked) -> None:
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

    def refuse(what: str, expected: object, got: object, hint: str) -> InputError:
        return InputError(
            f"argument `{leaf.path}` has {what} `{got}`, the program was traced with `{expected}`",
            hint=hint,
            facts={"argument": leaf.path, "expected": str(expected), "got": str(got)},
        )

    if str(value.dtype) != f"torch.{spec.dtype}":
        raise refuse(
            "dtype", spec.dtype, str(value.dtype).removeprefix("torch."), f"convert it with .to(torch.{spec.dtype})"
        )
    if value.device.type != spec.device:
        raise refuse("device", spec.device, value.device.type, f"move it to {spec.device}")
    if value.dim() != len(spec.shape):
        raise refuse("shape", list(spec.shape), list(value.shape), "give as many dimensions as at the trace")
    for dim, expected in enumerate(spec.shape):
        got = value.shape[dim]
        if isinstance(expected, str) and expected in checked.symbols:
            known = seen.setdefault(expected, got)
            if known != got:
                raise refuse(
                    f"size of dimension `{dim}` (`{expected}`)", known, got, "dimensions of one name have one size"
                )
            ranges = checked.symbols[expected][1]
            if not ranges[0].low <= got <= ranges[-1].high:
                _out_of_range(checked)(expected, got)
        elif isinstance(expected, int) and expected != got:
            raise refuse(f"size of dimension `{dim}`", expected, got, "declare the dimension dynamic to vary it")
    _check_stride(spec, value, seen, refuse)


def _check_stride(
    spec: TensorSpec, value: torch.Tensor, seen: Mapping[str, int], refuse: Callable[..., InputError]
) -> None:
    if spec.stride is None:
        if not value.is_contiguous():
            raise refuse("strides", "contiguous", list(value.stride()), "call .contiguous() on it")
        return
    wanted = tuple(
        size if isinstance(size, int) else eval(size, {"max": max, "min": min}, dict(seen)) for size in spec.stride
    )
    if tuple(value.stride()) != wanted:
        raise refuse("strides", list(wanted), list(value.stride()), "lay it out as at the trace")


def _check_sharing(leaves: Sequence[Leaf], tensors: Mapping[str, torch.Tensor]) -> None:
    for leaf in leaves:
        if leaf.same_as and tensors[leaf.path] is not tensors[leaf.same_as]:
            raise InputError(
                f"arguments `{leaf.same_as}` and `{leaf.path}` were one tensor at the trace and are two now",
                hint="pass the same tensor, or compile with two",
            )
    if any(leaf.is_written for leaf in leaves):
        owner: dict[int, str] = {}
        for leaf in leaves:
            if leaf.path in tensors and not leaf.same_as:
                other = owner.setdefault(tensors[leaf.path].data_ptr(), leaf.path)
                if other != leaf.path:
                    raise InputError(
                        f"arguments `{other}` and `{leaf.path}` share memory, and the model writes to one of its inputs",
                        hint="pass a copy",
                    )
