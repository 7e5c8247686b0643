"""What crosses a boundary, as text: specs of tensors and scalars with sizes as expressions; torch-free.

    float32[s0, 576] strides[576, 1] cpu        weight float32[576, 576] cpu        int        int unbacked

A size is a whole number or a Python expression over symbols (`2*s0`). Strides are left out when the
tensor is contiguous. The device is a type without an index: one text serves every device of a kind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

Size = int | str
BY_NAME = "*"  # stands among a program's parameters before those that are given by name alone

_TENSOR = re.compile(r"(weight )?(\w+)\[(.*?)\](?: strides\[(.*?)\])? (\w+)")


@dataclass(frozen=True)
class TensorSpec:
    """Type, sizes and place of a tensor; `stride is None` means contiguous."""

    dtype: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...] | None
    device: str
    is_weight: bool = False

    def __str__(self) -> str:
        strides = "" if self.stride is None else f" strides[{', '.join(map(str, self.stride))}]"
        weight, sizes = "weight " if self.is_weight else "", ", ".join(map(str, self.shape))
        return f"{weight}{self.dtype}[{sizes}]{strides} {self.device}"

    def as_weight(self) -> TensorSpec:
        return replace(self, is_weight=True)


@dataclass(frozen=True)
class ScalarSpec:
    """A Python number that crosses a boundary: `int`, `float`, `bool`, or `int unbacked` (known at run time only)."""

    kind: str

    def __str__(self) -> str:
        return self.kind

    @property
    def is_unbacked(self) -> bool:
        return self.kind == "int unbacked"


Spec = TensorSpec | ScalarSpec


def parse_spec(text: str) -> Spec:
    """Read a spec back from its text."""
    if text in ("int", "float", "bool", "int unbacked"):
        return ScalarSpec(text)
    match = _TENSOR.fullmatch(text)
    if not match:
        raise ValueError(f"not a spec: {text!r}")
    weight, dtype, shape, stride, device = match.groups()
    return TensorSpec(dtype, _sizes(shape), None if stride is None else _sizes(stride), device, bool(weight))


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(_size(part) for part in _split_commas(text))


def _size(text: str) -> Size:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _split_commas(text: str) -> list[str]:
    """Split at commas outside parentheses: sizes such as `max(s0, 2)` hold commas of their own."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    tail = text[start:].strip()
    return [*parts, tail] if tail else parts


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, as torch computes them (size 0 counts as 1)."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
