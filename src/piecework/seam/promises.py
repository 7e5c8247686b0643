"""What an operator's schema and fake promise of one call, held against what its body did.

Whoever runs bodies uses it: a trace, the first call of a program at each size, `piecework check`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from piecework.errors import ContractError
from piecework.seam.kinds import storage_of

OWN_SPACES = frozenset(("aten", "prims", "prim", "inductor", "higher_order", "_c10d_functional", "profiler"))
_MOST_BYTES = 1 << 26
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Arguments = Sequence[tuple[str, Tensor]]
Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


def is_custom_name(name: str) -> bool:
    """Tell whether `ns::op` is an operator that is not torch's own."""
    return name.partition("::")[0] not in OWN_SPACES


@dataclass(frozen=True)
class Expected:
    """A tensor as a fake describes it; a size or stride that is not known is None."""

    dtype: str
    device: str
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]


def expected_of(fakes: Any, size_of: Callable[[Any], int | None]) -> tuple[Expected | None, ...]:
    """Describe what a fake gave: a result or several, what is no tensor as None."""

    def describe(fake: Any) -> Expected | None:
        if not isinstance(fake, Tensor):
            return None
        shape, stride = (tuple(map(size_of, sizes)) for sizes in (fake.shape, fake.stride()))
        return Expected(_name(fake.dtype), fake.device.type, shape, stride)

    return tuple(map(describe, as_sequence(fakes)))


class Before:
    """What the arguments of a call hold before it."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._copies = [_snapshot(tensor) for _, tensor in arguments]
        self._layouts = [_layout(tensor) for _, tensor in arguments]

    def refuse_writes(self, name: str, written: Collection[int]) -> None:
        """Raise where the call wrote to memory that is not among `written`, as it is identified by `storage_of`.

        What it wrote is put back first, unless the answer may come later.
        """
        doubts = _DOUBTS.get()
        for (argument, tensor), old, layout in zip(self._arguments, self._copies, self._layouts, strict=True):
            if _layout(tensor) != layout:
                was, now = _described(layout), _described(_layout(tensor))
                raise broken(
                    name, argument, f"leaves its argument `{argument}` as `{now}`, which was `{was}`",
                    "write to an argument's elements, and leave its shape and dtype as they are",
                )  # fmt: skip
            if storage_of(tensor) in written:
                continue
            if doubts is not None and old[1] is not None:
                doubts.append((_bits(tensor).ne(_bits(old[1])).any(), name, argument))
            elif _changed(tensor, old):
                if old[1] is not None:
                    tensor.detach().copy_(old[1])
                raise undeclared_write(name, argument)


_DOUBTS: ContextVar[list[tuple[Tensor, str, str]] | None] = ContextVar("piecework_doubts", default=None)


@contextlib.contextmanager
def answered_later() -> Iterator[None]:
    """Let a device compare what calls may not write while the program goes on; raise at the end of the block.

    To wait for each answer would leave the device idle between any two calls.
    """
    doubts: list[tuple[Tensor, str, str]] = []
    token = _DOUBTS.set(doubts)
    try:
        yield
    finally:
        _DOUBTS.reset(token)
    if doubts:
        device = doubts[0][0].device
        answers = torch.stack([changed.to(device) for changed, _, _ in doubts]).tolist()
        for is_changed, (_, name, argument) in zip(answers, doubts, strict=True):
            if is_changed:
                raise undeclared_write(name, argument)


def is_recording() -> bool:
    """Tell whether work is noted for a graph instead of done, so that no value can be read."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return any(getattr(mode, "is_recording", False) for mode in _get_current_function_mode_stack())


def undeclared_write(name: str, argument: str) -> ContractError:
    """Return the error of an operator that writes what it does not declare."""
    return broken(
        name, argument, f"writes its argument `{argument}`, which its schema does not say",
        f"mark it in the schema, as in `Tensor(a!) {argument}`, or write to a copy",
    )  # fmt: skip


def check_results(name: str, result: Any, expected: Sequence[Expected | None]) -> None:
    """Raise where a call's results are not what its fake says.

    Tensors:
        result  [...]  any
    """
    outputs = as_sequence(result)
    if len(outputs) != len(expected):
        raise wrong_count(name, len(outputs), len(expected))
    for index, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        what = f"result {index}" if len(outputs) > 1 else "result"
        for kind, fake, got in differences(output, wanted):
            raise wrong(name, what, kind, fake, got)


def refuse_shared(name: str, result: Any, arguments: Arguments, aliased: Collection[str] = ()) -> None:
    """Raise where a result lies in the memory of an argument; of those in `aliased` the schema says that one may.

    Tensors:
        result     [...]  any
        arguments  [...]  any
    """
    outputs = as_sequence(result)
    for index, output in enumerate(outputs):
        what = f"result {index}" if len(outputs) > 1 else "result"
        for argument, tensor in arguments:
            if argument not in aliased and _is_shared(output, tensor):
                raise broken(
                    name, argument, f"gives back its argument `{argument}`, or a view of it, as its {what}",
                    "return a tensor of its own, as in `.clone()`: what shares memory must stand in the graph",
                )  # fmt: skip


def as_sequence(result: Any) -> Sequence[Any]:
    """Return a call's results one by one."""
    return result if isinstance(result, tuple | list) else (result,)


def differences(output: Any, wanted: Expected | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield (what differs, what the fake says, what it is) of a result; strides of no effect are let be."""
    if wanted is None or not isinstance(output, Tensor):
        if isinstance(output, Tensor) or wanted is not None:
            yield "kind", *(("no tensor", "a tensor") if wanted is None else ("a tensor", type(output).__name__))
        return
    if _name(output.dtype) != wanted.dtype:
        yield "dtype", wanted.dtype, _name(output.dtype)
    if output.device.type != wanted.device:
        yield "device", wanted.device, output.device.type
    shape = wanted.shape
    if len(shape) != output.dim() or any(s is not None and s != o for s, o in zip(shape, output.shape, strict=True)):
        yield "shape", [s if s is not None else "?" for s in shape], list(output.shape)
        return
    counted = [d for d, size in enumerate(output.shape) if size > 1 and wanted.stride[d] is not None]
    if output.numel() and any(wanted.stride[d] != output.stride(d) for d in counted):
        yield "strides", list(wanted.stride), list(output.stride())


def wrong(name: str, what: str, kind: str, fake: Any, got: Any) -> ContractError:
    """Return the error of a result that is not what the operator's fake says."""
    error = broken(
        name, what, f"gives a {what} of {kind} `{got}`, where its fake says `{fake}`",
        "let the function registered with `register_fake` describe what the body returns",
    )  # fmt: skip
    error.facts |= {"fake": fake, "got": got}
    return error


def wrong_count(name: str, got: int, expected: int) -> ContractError:
    """Return the error of an operator that gives another number of results than its fake."""
    return broken(
        name, "result", f"gives `{got}` results, where its fake says `{expected}`",
        "let the function registered with `register_fake` return as many results as the body",
    )  # fmt: skip


def broken(name: str, argument: str, what: str, hint: str) -> ContractError:
    """Return the error of an operator that does what was not promised of it."""
    return ContractError(f"operator `{name}` {what}", hint=hint, facts={"operator": name, "argument": argument})


def at_sizes(error: ContractError, sizes: Mapping[str, int]) -> ContractError:
    """Return the error with the sizes at which it was found."""
    if not sizes or "sizes" in error.facts:
        return error
    where = ", ".join(f"`{name}={size}`" for name, size in sizes.items())
    return ContractError(f"{error.message}, at {where}", hint=error.hint, facts={**error.facts, "sizes": dict(sizes)})


def _is_shared(output: Any, tensor: Tensor) -> bool:
    return isinstance(output, Tensor) and bool(output.numel()) and storage_of(output) == storage_of(tensor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(tensor: Tensor) -> Layout:
    return tensor.dtype, tensor.shape, tensor.stride()


def _described(layout: Layout) -> str:
    dtype, shape, stride = layout
    return f"{_name(dtype)}{list(shape)} strides{list(stride)}"


def _snapshot(tensor: Tensor) -> tuple[int, Tensor | None]:
    if tensor.is_inference():  # such a tensor counts no versions, so a copy has to tell
        return 0, tensor.detach().clone()
    small = tensor.numel() * tensor.element_size() <= _MOST_BYTES
    return tensor._version, tensor.detach().clone() if small else None


def _changed(tensor: Tensor, old: tuple[int, Tensor | None]) -> bool:
    version, copy = old
    if copy is None:
        return tensor._version != version
    return has_changed(tensor, copy)


def has_changed(tensor: Tensor, copy: Tensor) -> bool:
    """Tell whether a tensor differs from the copy taken of it, bit by bit: a NaN equals itself."""
    return not torch.equal(_bits(tensor), _bits(copy))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view(_WORDS[tensor.element_size()])
