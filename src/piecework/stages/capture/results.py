"""A program's result under padding: which dimensions follow which symbol, and that padding changes no real row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecework.errors import CaptureError
from piecework.runtime.regions import BoundRun
from piecework.runtime.segments import Output
from piecework.stages.capture.sources import rebuild_from_leaves
from piecework.values.tree import leaves

Named = Mapping[str, Any]


@dataclass(frozen=True)
class ResultRule:
    """How results follow sizes: for each value its dimensions with their symbols, or the symbol that a number is."""

    dims: Mapping[str, tuple[tuple[int, str], ...]]
    numbers: Mapping[str, str]


def flatten(run: BoundRun, values: Named) -> dict[str, Any]:
    """Return the values of a result by name; a model's nested result is taken apart into its leaves."""
    if list(values) == ["result"] and run.regions[-1].results == ("result",):
        return dict(leaves(values["result"], "result"))
    return dict(values)


def learn_rule(base: Named, size: int, smaller: Mapping[str, Named]) -> ResultRule:
    """Compare a result at one size with results at which one symbol is smaller by one."""
    dims: dict[str, tuple[tuple[int, str], ...]] = {}
    numbers: dict[str, str] = {}
    for name, value in base.items():
        if not isinstance(value, Tensor):
            for symbol, other in smaller.items():
                if other[name] != value:
                    numbers[name] = _number(name, value, other[name], size, symbol)
            continue
        found: list[tuple[int, str]] = []
        for symbol, other in smaller.items():
            for dim, (here, there) in enumerate(zip(value.shape, other[name].shape, strict=True)):
                if here != there:
                    _require_rows(name, dim, here, there, size)
                    found.append((dim, symbol))
        dims[name] = tuple(found)
    return ResultRule(dims, numbers)


def rename(rule: ResultRule, learned_of: BoundRun, run: BoundRun) -> ResultRule:
    """Return a rule under the names of a program's run; both runs are of one model, and build their results alike."""
    known, new = _paths_by_name(learned_of), {path: name for name, path in _paths_by_name(run).items()}

    def renamed(name: str) -> str:
        path = known.get(name, name)  # what was never traced names its values by their paths
        if path not in new:
            raise CaptureError(
                f"the whole forward returns no `{path}`, which the program does",
                hint="compile it from the same model and example inputs",
            )
        return new[path]

    return ResultRule(
        {renamed(name): dims for name, dims in rule.dims.items()},
        {renamed(name): symbol for name, symbol in rule.numbers.items()},
    )


def _paths_by_name(run: BoundRun) -> dict[str, str]:
    """Return where each value of a result stands in it."""
    names = {id(mark): (name, mark) for name, mark in ((name, object()) for name in run.result.arguments)}
    built = run.result.call(*(mark for _, mark in names.values()))
    return {names[id(leaf)][0]: path for path, leaf in leaves(built, "result") if id(leaf) in names}


def _require_rows(name: str, dim: int, here: int, there: int, size: int) -> None:
    if (here, there) != (size, size - 1):
        raise CaptureError(
            f"dimension {dim} of result `{name}` is `{here}` for {size} tokens and `{there}` for {size - 1}: "
            "which of its rows are padding is not known",
            hint="return one row a token, or leave the phase uncaptured",
            facts={"name": name, "dim": dim},
        )


def _number(name: str, here: Any, there: Any, size: int, symbol: str) -> str:
    if here == size and there == size - 1 and not isinstance(here, bool):
        return symbol
    raise CaptureError(
        f"result `{name}` is the number `{here}` for {size} tokens and `{there}` for {size - 1}: a graph keeps one",
        hint="return a tensor",
        facts={"name": name},
    )


def differing_rows(before: Named, after: Named, rule: ResultRule, symbol: str) -> tuple[str, ...]:
    """Return the values that differ although only the last row's input did; the last row of a value may."""
    return tuple(
        name for name, (one, two) in _real_rows(before, after, rule, symbol).items() if not _is_equal(one, two)
    )


def differing_sizes(padded: Named, exact: Named, rule: ResultRule, symbol: str) -> tuple[str, ...]:
    """Return the values whose rows are others where one row of padding follows them, by more than rounding explains.

    Tensors of other sizes go through other kernels, so that bits differ; a number of rows that enters a result shows.
    """
    return tuple(
        name for name, (one, two) in _real_rows(padded, exact, rule, symbol).items() if not _is_close(one, two)
    )


def _real_rows(padded: Named, other: Named, rule: ResultRule, symbol: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each tensor twice, without the rows that are padding: the last one along dimensions of the symbol."""
    found = {}
    for name, value in padded.items():
        if isinstance(value, Tensor):
            one, two = value, other[name]
            for dim, follows in rule.dims.get(name, ()):
                if follows == symbol:
                    rows = value.shape[dim] - 1
                    one, two = one.narrow(dim, 0, rows), two.narrow(dim, 0, rows)
            found[name] = (one, two)
    return found


def _is_equal(one: Tensor, two: Tensor) -> bool:
    return bool(((one == two) | ((one != one) & (two != two))).all())


def _is_close(one: Tensor, two: Tensor) -> bool:
    if not one.is_floating_point():
        return one.is_complex() or 2 * int((one != two).sum()) <= one.numel()  # the nearest of two equals may be either
    rounding = torch.finfo(one.dtype).eps ** 0.5
    one, two = one.double().nan_to_num(), two.double().nan_to_num()
    return bool((one - two).norm() <= rounding * two.norm())


def plan_outputs(
    run: BoundRun, values: Named, rule: ResultRule, positions: Mapping[str, int], alias: Callable[[Tensor], Tensor]
) -> tuple[tuple[Output, ...], Callable[..., Any]]:
    """Return where each value of the result lies, and the function that builds the result of them.

    What a caller passed in and gets back is the caller's own; tensors in the pool are kept by their address alone.
    """
    if list(values) != ["result"] or run.regions[-1].results != ("result",):
        taken = [_output(name, value, rule, positions, alias) for name, value in values.items()]
        return tuple(taken), run.result.call
    names: dict[str, str] = {}

    def name_leaf(path: str, leaf: Any) -> str | None:
        if isinstance(leaf, Tensor) or path in rule.numbers:
            return names.setdefault(path, f"r{len(names)}")
        return None

    build, _ = rebuild_from_leaves(values["result"], name_leaf)
    by_path = dict(leaves(values["result"], "result"))
    return tuple(_output(path, by_path[path], rule, positions, alias) for path in names), build


def _output(
    name: str, value: Any, rule: ResultRule, positions: Mapping[str, int], alias: Callable[[Tensor], Tensor]
) -> Output:
    if name in rule.numbers:
        return Output(None, positions[rule.numbers[name]])
    if name in positions:
        return Output(None, positions[name])
    assert isinstance(value, Tensor), f"{name} is a {type(value).__name__}"
    return Output(alias(value), -1, tuple((dim, positions[symbol]) for dim, symbol in rule.dims.get(name, ())))


def last_row(tensors: Sequence[tuple[Tensor, int]], fill: Callable[[Tensor], Any]) -> None:
    """Run `fill` over the last row of each tensor along its dimension."""
    for tensor, dim in tensors:
        fill(tensor.narrow(dim, tensor.shape[dim] - 1, 1))
