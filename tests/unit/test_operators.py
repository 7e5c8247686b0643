"""The registry's operators: their contract, their references against float64, and what an implementation may say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from piecework import ops
from piecework.errors import OptionError
from piecework.ops.norm import fused_add_rms_norm_reference
from piecework.ops.operators import operators
from piecework.values.tolerance import FLOOR_ULPS, ULP

BF16 = torch.bfloat16


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random rows.

    Tensors:
        ->  [...]  any
    """
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls() -> Iterator[tuple[str, tuple[object, ...]]]:
    heads = rows(1, 5, 3, 8).transpose(1, 2)
    for dtype in (torch.float32, BF16):
        x, residual, weight = rows(4, 16, dtype=dtype), rows(4, 16, dtype=dtype, seed=1), rows(16, dtype=dtype, seed=2)
        yield "rms_norm", (x, weight, 1e-6)
        yield "rms_norm", (x.t()[:8].t(), None, 1e-6, 4)
        yield "fused_add_rms_norm", (x, residual, weight, 1e-6, 8)
        yield "fused_add_rms_norm_", (x.clone(), residual.clone(), None, 1e-6)
        yield "silu_and_mul", (x[:, :8], x[:, 8:])
        yield "gelu_and_mul", (x[:, :8], x[:, 8:], "tanh")
        yield "quant_fp8_static", (x, torch.tensor(0.1))
        for per_token, group in ((False, 0), (True, 0), (False, 4)):
            yield "quant_fp8_dynamic", (x, per_token, group)
    yield "quant_fp8_dynamic__columns", (rows(6, 16), False, 4)
    for width, turned, interleaved in ((8, 8, False), (4, 8, True), (4, 4, False), (2, 4, True)):
        yield "rotary", (heads, rows(1, 1, 5, width), rows(1, 1, 5, width, seed=1), turned, interleaved)


@pytest.mark.parametrize(("name", "arguments"), list(calls()))
def test_operators_keep_their_contract(name: str, arguments: tuple[object, ...]) -> None:
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.piecework, name).default, arguments, test_utils=utils)


def test_the_reference_has_the_eleven_operations_of_its_decomposition() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x, residual, weight = (
        torch.ones(1, 4096, dtype=BF16),
        torch.ones(1, 4096, dtype=BF16),
        torch.ones(4096, dtype=BF16),
    )
    traced = make_fx(lambda *given: fused_add_rms_norm_reference(*given, 1e-6))(x, residual, weight)
    called = [str(node.target).split(".")[1] for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [
        "_to_copy", "_to_copy", "add", "_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "mul",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("variance_size", [None, 5])
@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_agree_with_float64(dtype: torch.dtype, variance_size: int | None, has_weight: bool) -> None:
    x, residual = rows(7, 12, dtype=dtype), rows(7, 12, dtype=dtype, seed=1)
    weight = rows(12, dtype=dtype, seed=2) if has_weight else None
    exact = x.double() + residual.double()
    part = exact if variance_size is None else exact[:, :variance_size]
    wanted = exact / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1.0 if weight is None else weight.double())
    normed, total = ops.fused_add_rms_norm(x, residual, weight, 1e-6, variance_size)
    allowed = FLOOR_ULPS * ULP[str(dtype)[6:]]
    assert normed.dtype == total.dtype == dtype
    assert (normed.double() - wanted).norm() <= allowed * wanted.norm()
    assert (total.double() - exact).norm() <= allowed * exact.norm()
    if dtype is torch.float32:
        assert torch.equal(ops.rms_norm(total, weight, 1e-6, variance_size), normed)


def test_a_norm_may_write_in_place() -> None:
    x, residual, weight = rows(3, 8), rows(3, 8, seed=1), rows(8, seed=2)
    wanted = ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    got = ops.fused_add_rms_norm(x, residual, weight, 1e-6, inplace=True)
    assert got[0] is x and got[1] is residual
    assert torch.equal(x, wanted[0]) and torch.equal(residual, wanted[1])
    with pytest.raises(OptionError, match=r"`residual` \[3, 8\] `torch\.bfloat16`"):
        ops.fused_add_rms_norm(x, residual.to(BF16), weight, 1e-6, inplace=True)
    with pytest.raises(OptionError, match="`variance_size` is `9` for rows of 8"):
        ops.rms_norm(x, weight, 1e-6, 9)


def test_activations_take_two_halves_or_one_tensor() -> None:
    both = rows(4, 12)
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(ops.silu_and_mul(both), torch.nn.functional.silu(gate) * up)
    assert torch.equal(ops.gelu_and_mul(gate, up, approximate="tanh"), ops.gelu_and_mul(both, approximate="tanh"))
    with pytest.raises(OptionError, match="rows of 11 have no two halves"):
        ops.silu_and_mul(both[:, :11])
    with pytest.raises(OptionError, match="`approximate` is `fast`"):
        ops.gelu_and_mul(both, approximate="fast")


def test_rotary_turns_pairs_by_their_angle() -> None:
    """Against complex numbers: pairs of halves, and pairs of neighbours, in part of a row."""
    x, angle = rows(2, 5, 10).double(), rows(5, 3, seed=1).double()
    turn = torch.polar(torch.ones_like(angle), angle)
    for interleaved in (False, True):
        part = x[..., :6]
        pairs = part.unflatten(-1, (3, 2)) if interleaved else part.unflatten(-1, (2, 3)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        wanted = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
        got = ops.rotary(x, angle.cos(), angle.sin(), rotary_dim=6, interleaved=interleaved)
        torch.testing.assert_close(got, torch.cat((wanted, x[..., 6:]), dim=-1))
        wide = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), dim=-1)
        again = ops.rotary(x, wide.cos(), wide.sin(), rotary_dim=6, interleaved=interleaved)
        torch.testing.assert_close(again, got)
    with pytest.raises(OptionError, match="turns 6 of 10 elements by cosines of width 5"):
        ops.rotary(x, rows(5, 5), rows(5, 5), rotary_dim=6)


def test_quantisation_keeps_values_within_half_a_step() -> None:
    x = rows(6, 32) * torch.logspace(-3, 3, 6)[:, None]
    x[2] = 0.0
    for words in ({}, {"per_token": True}, {"group_size": 8}):
        quantised, scale = ops.quant_fp8(x, **words)  # type: ignore[arg-type]
        assert quantised.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        wide = scale.repeat_interleave(8, -1) if "group_size" in words else scale
        back = quantised.float() * wide
        # Three bits after the point, and steps of 2**-9 below the least normal number.
        assert ((back - x).abs() <= x.abs() * 2**-4 + wide * 2**-10).all()
    assert ops.quant_fp8(x, group_size=8)[1].shape == (6, 4)
    scale = torch.tensor(0.5)
    quantised, same = ops.quant_fp8(x, scale)
    assert same is scale
    assert quantised.float().max() == min(448.0, float((x / 0.5).max().to(torch.float8_e4m3fn).float()))
    with pytest.raises(OptionError, match="got a scale, and was asked to find one"):
        ops.quant_fp8(x, scale, per_token=True)
    with pytest.raises(OptionError, match="rows of 32 do not fall into groups of 5"):
        ops.quant_fp8(x, group_size=5)


def test_an_implementation_belongs_to_an_operator_and_a_form() -> None:
    with pytest.raises(OptionError, match="there is no operator `rms`"):
        ops.implement("rms", "mine", {})
    with pytest.raises(OptionError, match="operator `quant_fp8` has an implementation `columns` already"):
        ops.implement("quant_fp8", "columns", {})
    with pytest.raises(OptionError, match="operator `rms_norm` has no form `rms`"):
        ops.implement("rms_norm", "mine", {"rms": torch.relu})
    (columns,) = [each for each in operators.get("quant_fp8").implementations if each.name == "columns"]  # type: ignore[union-attr]
    assert columns.irreplaceable and columns.serves({"group_size": 8}) and not columns.serves({"group_size": 0})
