"""The implementations in Triton give what the references give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecework.ops.operators import operators
from piecework.values.tolerance import FLOOR_ULPS, ULP

pytestmark = pytest.mark.gpu


def calls(dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...]]]:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 7, 96, 96, device="cuda", dtype=dtype)[:, 3]
    weight, heads = torch.randn(96, device="cuda", dtype=dtype), torch.randn(1, 5, 3, 96, device="cuda", dtype=dtype)
    return [
        ("rms_norm", (x, weight, 1e-6, None)),
        ("rms_norm", (heads.transpose(1, 2), weight.float(), 1e-6, 40)),
        ("fused_add_rms_norm", (x, residual, None, 1e-6, None)),
        ("silu_and_mul", (x[:, :48], x[:, 48:])),
        ("quant_fp8_dynamic", (x, True, 0)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", range(5))
def test_triton_gives_what_the_reference_gives(dtype: torch.dtype, index: int) -> None:
    form, arguments = calls(dtype)[index]
    operator = operators.of_form(form)
    assert operator is not None
    triton = next(each for each in operator.implementations if each.name == "triton")
    assert triton.is_at_hand("cuda") and triton.serves(
        dict(zip(operator.form(form).arguments, arguments, strict=True))
    )
    got = getattr(torch.ops.piecework, f"{form}__triton")(*arguments)
    wanted = operator.form(form).reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in arguments))
    own = getattr(torch.ops.piecework, form)(*arguments)
    for one, right, like in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, wanted, own)), strict=True):
        assert (one.dtype, one.stride()) == (like.dtype, like.stride())
        allowed = FLOOR_ULPS * ULP[str(one.dtype)[6:]]
        assert (one.double() - right.double()).norm() <= allowed * right.double().norm()
