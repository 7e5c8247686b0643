"""The check that every call passes: generated straight-line Python, and the slow path that explains.

The fast path compares type, dtype, shape, layout and device of each tensor and looks the range up. What
it does not recognise goes to `explain`, which names what is wrong, or finds that nothing is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecework.runtime.explain import (
    Checked,
    Leaf,
    make_explainer,
    out_of_range_error,
    refuse_argument,
    refuse_gradient,
)
from piecework.runtime.promised import tests_of
from piecework.values.shapes import Range
from piecework.values.signature import BY_NAME, TensorSpec

# What reading a value raises that is no tensor, or one without sizes or strides.
_UNLIKE = "(AttributeError, IndexError, KeyError, RuntimeError, TypeError)"


def compile_check(
    leaves: Sequence[Leaf],
    checked: Checked,
    runs: Sequence[Callable[..., Any]],
    elsewhere: Callable[..., Any] | None = None,
    single_sizes: Sequence[int] = (),
) -> tuple[Callable[..., Any], str]:
    """Return the function that checks a call, picks the run of its ranges and calls it; and its source.

    A size outside the ranges goes to `elsewhere` with the call's arguments, or raises where there is none. Each of
    `single_sizes` is a further range of the first symbol, whose runs follow those of the ranges.
    """
    constants = {leaf.path: leaf for leaf in leaves if leaf.spec is None}
    lines = [f"def call({', '.join(_parameter(name, checked, constants) for name, _ in checked.parameters)}):"]
    for name, default in checked.parameters:
        if name != BY_NAME and name not in checked.arguments:
            lines.append(f"    if {name} is not None: refuse_argument({name!r}, {name}, {default!r})")
    lines += ["    try:"] + [f"        {leaf.name} = {leaf.path}" for leaf in leaves if leaf.name != leaf.path]
    tensors = [leaf for leaf in leaves if isinstance(leaf.spec, TensorSpec)]
    lines += [f"        {name} = {_place(places[0], leaves)}" for name, (places, _) in checked.symbols.items()]
    lines += [f"        differs = {_condition(tensors, leaves, checked)}"]
    lines += [f"    except {_UNLIKE}: explain({_all(leaves)}); raise"]
    lines += [f"    if differs: explain({_all(leaves)})"]
    lines += _dispatch(checked, [leaf.name for leaf in tensors if _has_gradient(leaf.spec)], elsewhere is not None)
    source = "\n".join(lines) + "\n"
    space: dict[str, Any] = {
        "_Tensor": torch.Tensor,
        "torch": torch,
        "runs": runs,
        "elsewhere": elsewhere,
        "grad": torch.is_grad_enabled,
        "autocast": torch.is_autocast_enabled,
        "no_grad": torch.no_grad,
    }
    space |= _memory(checked)
    space |= {
        f"_{name}": getattr(torch, name)
        for name in {leaf.spec.dtype for leaf in tensors if isinstance(leaf.spec, TensorSpec)}
    }
    space |= {
        f"table_{name}": _table(ranges, () if index else single_sizes)
        for index, (name, (_, ranges)) in enumerate(checked.symbols.items())
    }
    space["explain"] = make_explainer(leaves, checked)
    space["refuse_argument"] = refuse_argument
    space["refuse_gradient"] = refuse_gradient
    space["out_of_range"] = out_of_range_error(checked)
    exec(compile(source, "<piecework signature>", "exec"), space)
    return space["call"], source


def _parameter(name: str, checked: Checked, constants: Mapping[str, Leaf]) -> str:
    if name == BY_NAME:
        return name
    if name in constants:
        return f"{name}={_literal(constants[name].value)}"
    return name if name in checked.arguments and not _after_default(name, checked, constants) else f"{name}=None"


def _literal(value: Any) -> str:
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _after_default(name: str, checked: Checked, constants: Mapping[str, Leaf]) -> bool:
    """Python wants no bare parameter after one with a default; such a one is checked as an argument all the same."""
    earlier = [other for other, _ in itertools.takewhile(lambda item: item[0] != name, checked.parameters)]
    return BY_NAME not in earlier and any(other not in checked.arguments or other in constants for other in earlier)


def _place(place: Sequence[Any], leaves: Sequence[Leaf]) -> str:
    path, dim = place
    name = next(leaf.name for leaf in leaves if leaf.path == path)
    return f"{name}.shape[{dim}]"


def _all(leaves: Sequence[Leaf]) -> str:
    """Write the dictionary of all leaves for the slow path: paths are read again there, one by one."""
    roots = dict.fromkeys(leaf.path.split("[")[0].split(".")[0] for leaf in leaves)
    return "{" + ", ".join(f"{root!r}: {root}" for root in roots) + "}"


def _condition(tensors: Sequence[Leaf], leaves: Sequence[Leaf], checked: Checked) -> str:
    parts: list[str] = []
    for leaf in tensors:
        spec = leaf.spec
        assert isinstance(spec, TensorSpec)
        parts += tests_of(leaf.name, spec)
        if leaf.same_as:
            parts.append(f"{leaf.name} is not {next(other.name for other in leaves if other.path == leaf.same_as)}")
    parts += _apart(tensors, checked)
    parts += [f"autocast({device!r})" for device in _devices(tensors)]
    parts += [_differs(leaf) for leaf in leaves if leaf.spec is None]
    parts += [f"len({path}) != {keys if isinstance(keys, int) else len(keys)}" for path, keys in checked.containers]
    return " or ".join(parts) or "False"


def _apart(tensors: Sequence[Leaf], checked: Checked) -> list[str]:
    """Write the tests that memory may be shared which is written; only programs that write something pay for them."""
    distinct = [leaf for leaf in tensors if not leaf.same_as and leaf.is_read]
    pointers = [f"{leaf.name}.untyped_storage().data_ptr()" for leaf in distinct]
    parts = []
    if len(distinct) > 1 and any(leaf.is_written for leaf in distinct):
        parts.append(f"len({{{', '.join(pointers)}}}) != {len(distinct)}")
    if distinct and checked.rivals:
        # Most arguments lie outside all of the program's own memory, which two comparisons tell.
        near = " or ".join(f"lowest <= {leaf.name}.data_ptr() < past" for leaf in distinct)
        parts.append(f"({near}) and not owned.isdisjoint(({', '.join(pointers)},))")
    return parts


def _memory(checked: Checked) -> dict[str, Any]:
    """Return the addresses of the memory that no argument may share, and the stretch that they all lie in."""
    storages = [held.tensor.untyped_storage() for held in checked.rivals if held.tensor.numel()]
    ends = [storage.data_ptr() + storage.nbytes() for storage in storages]
    owned = frozenset(storage.data_ptr() for storage in storages)
    return {"owned": owned, "lowest": min(owned, default=0), "past": max(ends, default=0)}


def _devices(tensors: Sequence[Leaf]) -> list[str]:
    return list(dict.fromkeys(leaf.spec.device for leaf in tensors if isinstance(leaf.spec, TensorSpec)))


def _differs(leaf: Leaf) -> str:
    """Write the test that a constant is another: of its type too, for `1`, `1.0` and `True` give other results."""
    if leaf.value is None:
        return f"{leaf.name} is not None"
    is_nan = leaf.value != leaf.value
    other = f"{leaf.name} == {leaf.name}" if is_nan else f"{leaf.name} != {_literal(leaf.value)}"
    if leaf.value == 0 and isinstance(leaf.value, float):  # the two zeros are equal, and divide to other infinities
        other = f"repr({leaf.name}) != {repr(leaf.value)!r}"
    return f"type({leaf.name}) is not {type(leaf.value).__name__} or {other}"


def _dispatch(checked: Checked, floating: Sequence[str], has_more: bool) -> list[str]:
    passed = ", ".join(checked.passed)
    everything = ", ".join(f"{name}={name}" for name, _ in checked.parameters if name != BY_NAME)
    index, lines = "0", []
    for name, (_, ranges) in checked.symbols.items():
        low, high = ranges[0].low, ranges[-1].high
        other = f"return elsewhere({everything})" if has_more else f"out_of_range({name!r}, {name})"
        lines.append(f"    if not {low} <= {name} <= {high}: {other}")
        index = f"table_{name}[{name}]" if index == "0" else f"({index}) * {len(ranges)} + table_{name}[{name}]"
    wanted = [f"{name}.requires_grad" for name in floating]
    return [
        *lines,
        "    if grad():",
        *([f"        if {' or '.join(wanted)}: refuse_gradient({everything})"] if wanted else []),
        f"        with no_grad(): return runs[{index}]({passed})",
        f"    return runs[{index}]({passed})",
    ]


def _has_gradient(spec: object) -> bool:
    return isinstance(spec, TensorSpec) and getattr(torch, spec.dtype).is_floating_point


def _table(ranges: Sequence[Range], single_sizes: Sequence[int]) -> list[int]:
    """Return the range's number for every size, by direct look-up."""
    table = [0] * (ranges[-1].high + 1)
    for number, item in enumerate(ranges):
        table[item.low : item.high + 1] = [number] * (item.high - item.low + 1)
    for number, size in enumerate(single_sizes, len(ranges)):
        table[size] = number
    return table
