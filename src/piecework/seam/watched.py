"""Bodies that are held to their operator's contract while a program runs: what it is called with, and what it gives.

A program runs so the first time it meets a size, and goes on with the bodies themselves. Fakes run on the meta device,
without memory, tracer or compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.errors import TraceError
from piecework.seam.deferred import run_deferred
from piecework.seam.kinds import storage_of
from piecework.seam.names import find
from piecework.seam.promises import Arguments, Before, Expected, check_results, expected_of, is_recording, refuse_shared
from piecework.values.tree import map_leaves

Body = Callable[..., Any]


def watched(name: str, body: Body, *, with_fake: bool = True) -> Body:
    """Return a body that raises ContractError where it writes or gives what the operator `name` does not say.

    Without `with_fake` what it gives is held to nothing: whoever calls it knows what the fake said, and looks.
    """
    operator = body if isinstance(body, _OPERATORS) else _operator(name)
    schema = _schema(operator)
    short = name.partition(".")[0]
    own = schema.arguments if schema is not None else ()
    names = [argument.name for argument in own]
    is_written = {a.name for a in own if a.alias_info is not None and a.alias_info.is_write}
    may_share = any(result.alias_info is not None for result in schema.returns) if schema is not None else False
    aliased = {a.name for a in own if a.alias_info is not None} if may_share else ()

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = list(_tensors(names, args, kwargs))
        expected = _expected(operator, args, kwargs, arguments) if with_fake and operator is not None else None
        before = None if schema is None or is_recording() else Before(arguments)
        result = body(*args, **kwargs)
        if before is not None:
            before.refuse_writes(short, {storage_of(tensor) for name, tensor in arguments if name in is_written})
        refuse_shared(short, result, arguments, aliased)
        if expected is not None:
            check_results(short, result, expected)
        return result

    return call


_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _operator(name: str) -> Any:
    try:
        return find("torch.ops." + name.replace("::", "."))
    except TraceError:
        return None  # a body that was handed in needs no registration


def _schema(operator: Any) -> Any:
    """Return an operator's schema; None where it has several overloads, and which is meant is not known."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        overloads = operator.overloads()
        operator = getattr(operator, overloads[0]) if len(overloads) == 1 else None
    return getattr(operator, "_schema", None)


def _tensors(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    given = [(names[i] if i < len(names) else f"argument {i}", value) for i, value in enumerate(args)]
    for name, value in [*given, *kwargs.items()]:
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Tensor):
                yield name, item


def _expected(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: Arguments
) -> tuple[Expected | None, ...] | None:
    """Return what the fake says of this call; None where it cannot tell without values."""
    devices = {tensor.device.type for _, tensor in arguments}
    shapes = map_leaves(_without_memory, [list(args), dict(kwargs)], "call")
    try:
        with torch.no_grad():
            try:
                fakes = operator(*shapes[0], **shapes[1])
            except NotImplementedError:
                run_deferred()  # what torch knows of its own operators without memory waits until it is asked for
                fakes = operator(*shapes[0], **shapes[1])
    except Exception:  # noqa: BLE001  # a size that data decide, or a fake that asks for more than a shape
        return None
    return expected_of(fakes, int, devices.pop() if len(devices) == 1 else "")


def _without_memory(_: str, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
