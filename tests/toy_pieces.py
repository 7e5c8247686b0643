"""Texts of a toy model's three pieces, and inputs for any of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piecework.values.signature import ScalarSpec, TensorSpec, contiguous_stride, parse_spec

_NORM = """\
    {n}0 = {x}.pow(2)
    {n}1 = {n}0.mean(-1, keepdim=True)
    {n}2 = operator.add({n}1, 1e-05)
    {n}3 = torch.rsqrt({n}2)
    {n}4 = operator.mul({x}, {n}3)
    {n}5 = operator.mul({n}4, {w})
"""
_ROPE = """\
    {r}0 = {x}.view(s0, {heads}, 4)
    {r}1 = {r}0.chunk(2, -1)
    {r}2 = operator.getitem({r}1, 0)
    {r}3 = operator.getitem({r}1, 1)
    {r}4 = operator.mul({r}2, {cos})
    {r}5 = operator.mul({r}3, {sin})
    {r}6 = operator.sub({r}4, {r}5)
    {r}7 = operator.mul({r}3, {cos})
    {r}8 = operator.mul({r}2, {sin})
    {r}9 = operator.add({r}7, {r}8)
    {r}10 = torch.cat(({r}6, {r}9), -1)
"""


def _attention_inputs(hidden: str, weight: str, cos: str, sin: str) -> str:
    return (
        f"""\
    q0 = torch._C._nn.linear({hidden}, {weight}, None)
    q1 = q0.split([16, 8, 8], -1)
    q2 = operator.getitem(q1, 0)
    q3 = operator.getitem(q1, 1)
    q4 = operator.getitem(q1, 2)
"""
        + _ROPE.format(r="r", x="q2", heads=4, cos=cos, sin=sin)
        + _ROPE.format(r="k", x="q3", heads=2, cos=cos, sin=sin)
        + "    q5 = q4.view(s0, 2, 4)\n    q6 = torch.empty_like(r10)\n"
    )


_FEED_FORWARD = (
    """\
    a0 = x0.view(s0, 16)
    a1 = torch._C._nn.linear(a0, w0, None)
    a2 = operator.add(a1, x1)
"""
    + _NORM.format(n="m", x="a2", w="w1")
    + """\
    b0 = torch._C._nn.linear(m5, w2, None)
    b1 = b0.chunk(2, -1)
    b2 = operator.getitem(b1, 0)
    b3 = operator.getitem(b1, 1)
    b4 = torch.nn.functional.silu(b2)
    b5 = operator.mul(b4, b3)
    b6 = torch._C._nn.linear(b5, w3, None)
    b7 = operator.add(b6, a2)
"""
)

FIRST = (
    """\
def piece(
    s0: "int",
    x0: "int64[s0] cpu",
    x1: "int64[s0] cpu",
    w0: "weight float32[64, 16] cpu",
    w1: "weight float32[256, 2] cpu",
    w2: "weight float32[256, 2] cpu",
    w3: "weight float32[16] cpu",
    w4: "weight float32[32, 16] cpu",
):
    e0 = torch.nn.functional.embedding(x0, w0, None, None, 2.0, False, False)
    e1 = operator.getitem(w1, x1)
    e2 = operator.getitem(e1, (slice(None, None, None), None))
    e3 = operator.getitem(w2, x1)
    e4 = operator.getitem(e3, (slice(None, None, None), None))
"""
    + _NORM.format(n="m", x="e0", w="w3")
    + _attention_inputs("m5", "w4", "e2", "e4")
    + "    return (r10, k10, q5, q6, e0, e2, e4)\n"
)
MIDDLE = (
    """\
def piece(
    s0: "int",
    x0: "float32[s0, 4, 4] cpu",
    x1: "float32[s0, 16] cpu",
    x2: "float32[s0, 1, 2] cpu",
    x3: "float32[s0, 1, 2] cpu",
    w0: "weight float32[16, 16] cpu",
    w1: "weight float32[16] cpu",
    w2: "weight float32[64, 16] cpu",
    w3: "weight float32[16, 32] cpu",
    w4: "weight float32[16] cpu",
    w5: "weight float32[32, 16] cpu",
):
"""
    + _FEED_FORWARD
    + _NORM.format(n="n", x="b7", w="w4")
    + _attention_inputs("n5", "w5", "x2", "x3")
    + "    return (r10, k10, q5, q6, b7)\n"
)
LAST = (
    """\
def piece(
    s0: "int",
    x0: "float32[s0, 4, 4] cpu",
    x1: "float32[s0, 16] cpu",
    w0: "weight float32[16, 16] cpu",
    w1: "weight float32[16] cpu",
    w2: "weight float32[64, 16] cpu",
    w3: "weight float32[16, 32] cpu",
    w4: "weight float32[16] cpu",
):
"""
    + _FEED_FORWARD
    + _NORM.format(n="n", x="b7", w="w4")
    + "    return (n5,)\n"
)
PIECES = {"first": FIRST, "middle": MIDDLE, "last": LAST}
UNINITIALISED = {"first": {3}, "middle": {3}, "last": set()}


def write_piece(parameters: Mapping[str, str], *lines: str) -> str:
    """Write a piece's text from its parameters' specs and the lines of its body."""
    head = "".join(f'    {name}: "{spec}",\n' for name, spec in parameters.items())
    return f"def piece(\n{head}):\n" + "".join(f"    {line}\n" for line in lines)


def inputs_for(text: str, sizes: Mapping[str, int], seed: int = 0) -> tuple[list[object], list[torch.Tensor]]:
    """Make (symbols and activations, weights) for a piece at these sizes, the same for the same seed."""
    source = torch.Generator().manual_seed(seed)
    called: list[object] = []
    weights: list[torch.Tensor] = []
    for line in text.splitlines()[1:]:
        if line.startswith(")"):
            break
        name, _, rest = line.strip().rstrip(",").partition(": ")
        spec = parse_spec(rest.strip('"'))
        if isinstance(spec, ScalarSpec):
            called.append(sizes[name])
            continue
        value = _tensor(spec, sizes, source)
        (weights if spec.is_weight else called).append(value)
    return called, weights


def _tensor(spec: TensorSpec, sizes: Mapping[str, int], source: torch.Generator) -> torch.Tensor:
    shape = [eval(str(size), {}, dict(sizes)) for size in spec.shape]
    stride = contiguous_stride(shape) if spec.stride is None else [eval(str(s), {}, dict(sizes)) for s in spec.stride]
    dtype = getattr(torch, spec.dtype)
    empty = torch.empty_strided(shape, stride, dtype=dtype)
    if dtype.is_floating_point:
        return empty.copy_(torch.randn(shape, generator=source))
    return empty.copy_(torch.randint(0, 50, shape, generator=source))
