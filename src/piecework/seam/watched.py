"""Bodies that are held to their operator's contract while a program runs: what it is called with, and what it gives.

A program runs so the first time it meets a size, and goes on with the bodies themselves. Those inside pieces stay held
to their fakes, as no line of the program's own code sees their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.errors import TraceError
from piecework.seam.contract_errors import undeclared_write
from piecework.seam.kinds import storage_of
from piecework.seam.names import find
from piecework.seam.promises import Before, Expected, call_body, check_results, expected_of, is_recording, refuse_shared
from piecework.seam.shadow import fake_of

Body = Callable[..., Any]


def watched(name: str, body: Body, *, with_fake: bool = True) -> Body:
    """Return a body that raises ContractError where it writes or gives what the operator `name` does not say.

    Without `with_fake` what it gives is held to nothing: whoever calls it knows what the fake said, and looks.
    """
    operator = body if isinstance(body, _OPERATORS) else _operator(name)
    schema = _schema(operator)
    short = name.partition(".")[0]
    fake = fake_of(short) if with_fake else None
    own = schema.arguments if schema is not None else ()
    names = [argument.name for argument in own]
    is_written = {a.name for a in own if a.alias_info is not None and a.alias_info.is_write}
    may_share = any(result.alias_info is not None for result in schema.returns) if schema is not None else False
    aliased = {a.name for a in own if a.alias_info is not None} if may_share else ()

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = list(_tensors(names, args, kwargs))
        expected = _expected(fake, args, kwargs) if fake is not None else None
        before = None if schema is None or is_recording() else Before(arguments)
        result = call_body(short, body, args, kwargs)
        if before is not None:
            before.refuse_writes(short, {storage_of(tensor) for name, tensor in arguments if name in is_written})
        refuse_shared(short, result, arguments, aliased)
        if expected is not None:
            check_results(short, result, expected)
        return result

    return call


def held(name: str, body: Body) -> Body:
    """Return a body whose results are held against the fake of the operator `name`, at each layout of a call once.

    A layout is that of the results at the arguments' shapes, so that a result which changes later is looked at again.
    What is written undeclared is seen by torch's counter of versions, which tensors of an inference do not have.
    """
    fake = fake_of(name)
    known: set[Any] = set()

    def call(*args: Any, **kwargs: Any) -> Any:
        given = _leaves([*args, *kwargs.values()] if kwargs else args)
        tensors = [value for value in given if isinstance(value, Tensor)]
        before = _versions(tensors)
        result = call_body(name, body, args, kwargs)
        if before != _versions(tensors):
            _refuse_written(name, body, args, kwargs, before)
        try:
            results = () if result is None else result if isinstance(result, _SEVERAL) else (result,)
            layouts = (
                *[value.shape if isinstance(value, Tensor) else value for value in given],
                *[(one.dtype, one.shape, one.stride(), one.device) for one in results],
            )
            if layouts in known:
                return result
        except (AttributeError, RuntimeError):  # a result that is no tensor, or one without strides
            layouts = ()
        if is_recording() or fake is None:
            return result
        expected = _expected(fake, args, kwargs)
        if expected is not None:
            check_results(name, result, expected)
        if len(known) >= _MOST_LAYOUTS:
            known.clear()
        known.add(layouts)
        return result

    return call


_MOST_LAYOUTS = 1 << 12
_SEVERAL = (tuple, list)


def _leaves(values: Sequence[Any]) -> Sequence[Any]:
    for value in values:
        if isinstance(value, _SEVERAL):
            return [one for each in values for one in (_leaves(each) if isinstance(each, _SEVERAL) else (each,))]
    return values


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return []  # one of an inference counts none


def _refuse_written(name: str, body: Body, args: Any, kwargs: Any, before: Sequence[int]) -> None:
    """Raise where a tensor whose version moved is none that the schema says to be written, nor a view of one."""
    schema = _schema(body if isinstance(body, _OPERATORS) else _operator(name))
    if schema is None:
        return
    is_written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    arguments = list(_tensors([argument.name for argument in schema.arguments], args, kwargs))
    declared = {storage_of(tensor) for argument, tensor in arguments if argument in is_written}
    for (argument, tensor), old in zip(arguments, before, strict=False):
        if tensor._version != old and storage_of(tensor) not in declared:
            raise undeclared_write(name, argument)


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


def _expected(fake: Body, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Expected | None, ...] | None:
    """Return what the fake says of this call; None where it cannot tell without values.

    It is given the arguments themselves, and so makes memory of the results' size for a moment: torch's own ways, fake
    tensors and the meta device, would import sympy.
    """
    try:
        with torch.no_grad():
            fakes = fake(*args, **kwargs)
    except Exception:  # noqa: BLE001  # a size that data decide: there is no trace to ask for it
        return None
    return expected_of(fakes, int)
