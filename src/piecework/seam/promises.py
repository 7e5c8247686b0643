"""What an operator's schema and fake promise of one call, held against what its body did.

Whoever runs bodies uses it: a trace, the first call of a program at each size, `piecework check`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from piecework.seam.contract_errors import broken, undeclared_write, wrong, wrong_count
from piecework.seam.kinds import storage_of
from piecework.values.overlap import is_overlapping

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
        self._memory = [storage_of(tensor) for _, tensor in arguments]

    def refuse_writes(self, name: str, written: Collection[int]) -> None:
        """Raise where the call wrote to memory that is not among `written`, as it is identified by `storage_of`.

        What it wrote is put back first, unless the answer may come later.
        """
        doubts = _DOUBTS.get()
        before = zip(self._arguments, self._copies, self._layouts, self._memory, strict=True)
        for (argument, tensor), old, layout, memory in before:
            if _layout(tensor) != layout:
                was, now = _described(layout), _described(_layout(tensor))
                raise broken(
                    name, argument, f"leaves its argument `{argument}` as `{now}`, which was `{was}`",
                    "write to an argument's elements, and leave its shape and dtype as they are",
                )  # fmt: skip
            if storage_of(tensor) != memory:
                raise broken(
                    name, argument, f"gives its argument `{argument}` other memory",
                    "write to an argument's elements, as in `copy_`: whoever holds a view of it reads the old memory",
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


def call_body(name: str, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a body; what torch's dispatcher says of results that are not the schema's is said as ContractError."""
    try:
        return body(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        said = str(error).splitlines()[0] if str(error) else ""
        if not _NOT_BY_SCHEMA.match(said) or not _is_torch_s_own(error):
            raise
        raise broken(
            name, "result", f"gives what its schema does not say: `{said[:120]}`",
            "let the body return as many results as the schema says, each a tensor where it says so, and none for `()`",
        ) from error  # fmt: skip


# What torch's dispatcher says of a Python body's results that it cannot take.
_NOT_BY_SCHEMA = re.compile(
    r"Unable to cast |Object of type '.*' is not an instance of 'sequence'|Expected PythonKernelHolder for "
)


def _is_torch_s_own(error: BaseException) -> bool:
    """Tell whether torch raised an error itself, not a body that it called."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    file = place.tb_frame.f_code.co_filename if place is not None else ""
    return file in (__file__, torch._ops.__file__)


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
    """Raise where a result lies in the memory of an argument, or shares an element with another result.

    Of the arguments in `aliased` the schema says that a result may lie in one.

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
        for other, earlier in enumerate(outputs[:index] if not aliased else ()):
            if _is_shared(output, earlier) and is_overlapping(output, earlier):
                raise broken(
                    name, what, f"gives its results {other} and {index} the same memory",
                    "return a tensor of its own for each, as in `.clone()`: pieces take them for two",
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
    if output.layout is not torch.strided:
        yield "layout", "strided", str(output.layout).removeprefix("torch.")
        return
    if len(shape) != output.dim() or any(s is not None and s != o for s, o in zip(shape, output.shape, strict=True)):
        yield "shape", [s if s is not None else "?" for s in shape], list(output.shape)
        return
    counted = [d for d, size in enumerate(output.shape) if size > 1 and wanted.stride[d] is not None]
    if output.numel() and any(wanted.stride[d] != output.stride(d) for d in counted):
        yield "strides", list(wanted.stride), list(output.stride())


def _is_shared(output: Any, tensor: Any) -> bool:
    pair = (output, tensor)
    if not all(isinstance(one, Tensor) and one.layout is torch.strided and one.numel() for one in pair):
        return False
    return storage_of(output) == storage_of(tensor)


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
