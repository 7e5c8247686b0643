"""One step in so many through eager as well: how far a program is from its texts while it serves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piecework.events import Drift, Observer
from piecework.values.difference import compare, copy_of
from piecework.values.tree import leaves

Call = Callable[..., Any]


def watched(call: Call, make_eager: Callable[[], Call], every: int, observer: Observer) -> Call:
    """Return a call that runs each `every`th step through eager first, and tells how far its result is from eager's.

    Eager gets copies of the arguments. Opaque bodies run twice on such a step, with the same metadata: the program's
    run comes second, so that what stays in caches is what it would have written alone. Eager is made when first needed.
    """
    steps = itertools.count(1)
    made: list[Call] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        step = next(steps)
        if step % every:
            return call(*args, **kwargs)
        if not made:
            made.append(make_eager())
        expected = _own(made[0](*_own(args), **_own(kwargs)))
        result = call(*args, **kwargs)
        observer(_measure(step, result, expected))
        return result

    return run


def _measure(step: int, result: Any, expected: Any) -> Drift:
    pairs = list(zip(leaves(result, "result"), leaves(expected, "result"), strict=True))
    found = [compare(name, one, two) for (name, one), (_, two) in pairs if isinstance(two, Tensor)]
    worst = max(found, key=lambda each: each.error, default=None)
    if worst is None:
        return Drift(step=step, error=0.0, output="", num_compared=0)
    return Drift(step=step, error=worst.error, output=worst.name, num_compared=len(found))


def _own(value: Any) -> Any:
    """Copy the tensors of nested arguments: a step may write to them."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            return copy_of(value)
    if isinstance(value, Mapping):
        return {name: _own(inner) for name, inner in value.items()}
    return type(value)(map(_own, value)) if type(value) in (tuple, list) else value
