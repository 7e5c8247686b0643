"""Results of opaque bodies, held at every call against what their operators' fakes said: pieces were compiled for that.

The test of a result stands in the program's code, as does that of an argument. What it does not recognise goes to a
function that names what differs, or finds that it is of no effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from piecework.seam.contract_errors import at_sizes, wrong, wrong_count
from piecework.seam.promises import Expected, differences
from piecework.values.graph import NOTHING
from piecework.values.signature import ScalarSpec, Size, TensorSpec, contiguous_stride, parse_spec

_WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_FUNCTIONS = {"max", "min", "int", "float", "abs", "round", "math", "torch"}


def tests_of(name: str, spec: TensorSpec, known: Collection[str] | None = None) -> list[str]:
    """Write the tests that a value is not a tensor of this spec.

    They speak of `_Tensor`, of `_float32` and its like, and of sizes by their names; sizes of other names than those
    in `known`, which data decide, are not looked at.
    """
    found = [f"type({name}) is not _Tensor", f"{name}.dtype is not _{spec.dtype}", f"not {name}.is_{spec.device}"]
    if _is_known(spec.shape, known):
        found.append(f"{name}.shape != {_tuple(spec.shape)}")
    else:
        found.append(f"{name}.dim() != {len(spec.shape)}")
        found += [f"{name}.shape[{d}] != {s}" for d, s in enumerate(spec.shape) if _is_known([s], known)]
    if spec.stride is None:
        found.append(f"not {name}.is_contiguous()")
    elif _is_known(spec.stride, known):
        found.append(f"{name}.stride() != {_tuple(spec.stride)}")
    return found


def result_test(name: str, text: str, known: Collection[str]) -> str:
    """Write the test that a result is not what was promised of it; empty where nothing was."""
    if text == NOTHING:
        return f"{name} is not None"
    spec = parse_spec(text) if text else ScalarSpec("int")
    return " or ".join(tests_of(name, spec, known)) if isinstance(spec, TensorSpec) else ""


def count_test(operator: str, count: int, names: Sequence[str]) -> Callable[..., Any]:
    """Return a function that gives back a body's results, and raises where they are not as many as was promised.

    It is called with the results and with the sizes of these names.
    """

    def counted(results: Any, *sizes: int) -> Any:
        if type(results) in (tuple, list) and len(results) == count:
            return results
        error = wrong_count(operator, len(results) if isinstance(results, tuple | list) else 1, count)
        raise at_sizes(error, dict(zip(names, sizes, strict=True)))

    return counted


def refusal(operator: str, what: str, text: str, names: Sequence[str]) -> Callable[..., None]:
    """Return what is called with a result that a test did not recognise, and with the sizes of these names.

    It raises ContractError with operator, result, the fake's value, the real one and the sizes; a stride that no
    element depends on is let pass.
    """
    spec = parse_spec(text) if text != NOTHING else None

    def refuse(value: Any, *sizes: int) -> None:
        at = dict(zip(names, sizes, strict=True))
        expected = _expected(spec, at) if isinstance(spec, TensorSpec) else None
        for kind, fake, got in differences(value, expected):
            raise at_sizes(wrong(operator, what, kind, fake, got), at)

    return refuse


def _expected(spec: TensorSpec, sizes: Mapping[str, int]) -> Expected:
    shape = tuple(_size(size, sizes) for size in spec.shape)
    if spec.stride is not None:
        return Expected(spec.dtype, spec.device, shape, tuple(_size(step, sizes) for step in spec.stride))
    plain = [size for size in shape if size is not None]
    stride = contiguous_stride(plain) if len(plain) == len(shape) else (None,) * len(shape)
    return Expected(spec.dtype, spec.device, shape, stride)


def _size(size: Size, sizes: Mapping[str, int]) -> int | None:
    if isinstance(size, int) or not _is_known([size], sizes):
        return size if isinstance(size, int) else None
    return int(eval(size, {"math": math, "torch": torch, **sizes}))


def _is_known(sizes: Sequence[Size], known: Collection[str] | None) -> bool:
    if known is None:
        return True
    words = {word for size in sizes if isinstance(size, str) for word in _WORD.findall(size)}
    return words <= {*known, *_FUNCTIONS}


def _tuple(sizes: Sequence[Size]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
