"""Opaque operators of the case tests, and the comparison each case makes: a program beside its model at many sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import piecework as pw
from piecework.runtime.program import Program
from piecework.values.tree import leaves

SIZES = (1, 2, 7, 64, 65, 300)
_library = torch.library.Library("cases", "FRAGMENT")
calls: list[str] = []


def _define(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, body, "CPU")
    torch.library.register_fake(f"cases::{name}", fake, lib=_library)


def _put(x: Tensor) -> Tensor:
    calls.append(f"put {len(x)}")
    return x + 1


def _into(q: Tensor, out: Tensor) -> None:
    out.copy_(q * 3)


def _named(x: Tensor, name: str) -> Tensor:
    calls.append(name)
    return x * 2


_define("fresh(Tensor x) -> Tensor", lambda x: x * 3, lambda x: torch.empty_like(x))
_define(
    "two(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x + 2), lambda x: (torch.empty_like(x), torch.empty_like(x))
)
_define("into(Tensor q, Tensor(a!) out) -> ()", _into, lambda q, out: None)
_define("put(Tensor x) -> Tensor", _put, lambda x: torch.empty_like(x))
_define("named(Tensor x, str name) -> Tensor", _named, lambda x, name: torch.empty_like(x))
_define("sized(Tensor x, SymInt n) -> Tensor", lambda x, n: x + n, lambda x, n: torch.empty_like(x))
SPLIT = ("cases::fresh", "cases::two", "cases::into", "cases::put", "cases::named", "cases::sized")


def compile_case(model: torch.nn.Module, example: Any, **given: Any) -> Program:
    """Compile a case: dimension 0 of `x` varies, cut at the operators above, in a store of its own."""
    options = {"compiler": "eager", "split_ops": SPLIT, **given.pop("options", {})}
    given = {"dynamic": {"x": {0: "tokens"}}, "store": pw.MemoryStore(), **given}
    return pw.compile(model, example, options=pw.CompileOptions(**options), **given)


def tensors(value: Any) -> list[Any]:
    """Return the leaves of a nested result in order."""
    return [leaf for _, leaf in leaves(value, "result")]


def assert_same(got: Any, expected: Any, exact: bool = True) -> None:
    """Compare two nested results leaf by leaf: bits with the eager compiler, closeness otherwise."""
    assert type(got) is type(expected)
    for one, two in zip(tensors(got), tensors(expected), strict=True):
        if not isinstance(two, Tensor):
            assert (type(one), one) == (type(two), two)
            continue
        assert (one.shape, one.dtype, one.stride()) == (two.shape, two.dtype, two.stride())
        assert torch.equal(one, two) if exact else torch.allclose(one, two, rtol=1e-5, atol=1e-5)


def assert_serves(
    model: torch.nn.Module,
    make: Callable[[int], tuple[Any, ...]],
    *,
    sizes: Sequence[int] = SIZES,
    compiler: str = "eager",
    **given: Any,
) -> Program:
    """Compile for `make(5)` and compare with the model at every size; inputs written in place are compared too."""
    torch.manual_seed(0)
    options = {"compiler": compiler, **given.pop("options", {})}
    program = compile_case(model, make(5), options=options, **given)
    for size in sizes:
        mine = make(size)
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in mine]
        with torch.no_grad():
            expected = model(*own)
        assert_same(program(*mine), expected, compiler == "eager")
        assert_same(list(mine), own, compiler == "eager")
    return program


def rows(size: int) -> tuple[Tensor]:
    """Draw the input of most cases.

    Tensors:
        ->  [T, 4]  f32
    """
    return (torch.rand(size, 4) + 0.5,)
