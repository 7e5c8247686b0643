"""Neighbours of the patterns that passes look for: another spelling, another dimension, a cast or write elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_models import WIDTH, Case, Forward, Results, norm, turned


def _sigmoid_of(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def rows_of(x: Tensor, power: Callable[[Tensor], Tensor], eps: float = 1e-5) -> Tensor:
    """Norm without a weight, the mean of squares spelled by the case."""
    wide = x.float() if x.dtype is not torch.float64 else x
    return (wide * torch.rsqrt(power(wide) + eps)).to(x.dtype)


def _norm_in_place(m: Case, x: Tensor, y: Tensor) -> Results:
    wide = x.float() if x.dtype is not torch.float64 else x.clone()
    root = wide.pow(2).mean(-1, keepdim=True).add_(1e-5).rsqrt_()
    return m.weight * wide.mul_(root).to(x.dtype)


def _residual_twice(m: Case, x: Tensor, y: Tensor) -> Results:
    total = x + y
    normed = norm(total, m.weight)
    return normed + total, total * y, norm(total, m.wide[:WIDTH])


def _residual_of_residual(m: Case, x: Tensor, y: Tensor) -> Results:
    first = x + y
    second = first + norm(first, m.weight)
    return norm(second, m.weight), second


def _two_eps(m: Case, x: Tensor, y: Tensor) -> Results:
    rows = [rows_of(x + y, lambda w: w.pow(2).mean(-1, keepdim=True), eps) * m.weight for eps in (1e-5, 1e-1)]
    return rows[0], rows[1]


def _residual_in_place_then_read(m: Case, x: Tensor, y: Tensor) -> Results:
    y += x
    normed = norm(y, m.weight)
    y.mul_(2)
    return normed, y + normed


def _gate_in_place(m: Case, x: Tensor, y: Tensor) -> Results:
    gate, up = m.up(x).chunk(2, -1)
    return F.silu(gate, inplace=True) * up


def _gate_other_way(m: Case, x: Tensor, y: Tensor) -> Results:
    up, gate = m.up(x).chunk(2, -1)
    return up * F.silu(gate)


def _gate_uneven(m: Case, x: Tensor, y: Tensor) -> Results:
    both = m.up(x)
    return F.silu(both[..., : WIDTH - 2]) * both[..., WIDTH + 2 :]


def _gate_overlapping(m: Case, x: Tensor, y: Tensor) -> Results:
    both = m.up(x)
    return F.silu(both[..., :WIDTH]) * both[..., WIDTH // 2 : WIDTH // 2 + WIDTH]


def _quant_of_rows(m: Case, x: Tensor, y: Tensor, dim: int | None = -1) -> Results:
    wide = x.float() if x.dtype is not torch.float64 else x
    most = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = most.clamp(min=1e-12) / 448.0
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype), scale


def _quant_by_reciprocal(m: Case, x: Tensor, y: Tensor) -> Results:
    return (x.float() * m.scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _quant_bare(m: Case, x: Tensor, y: Tensor) -> Results:
    return (x.float() / m.scale).to(torch.float8_e4m3fn).to(x.dtype)


def _quant_wide(m: Case, x: Tensor, y: Tensor) -> Results:
    return (x.float() / m.scale).clamp(-448, 448).to(torch.float8_e5m2).to(x.dtype)


def _quant_narrow(m: Case, x: Tensor, y: Tensor) -> Results:
    return (x / m.scale.to(x.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _quant_cast_back(m: Case, x: Tensor, y: Tensor) -> Results:
    return (x.float() / m.scale).to(x.dtype).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _turned_between(m: Case, x: Tensor, y: Tensor) -> Results:
    cos, sin = y.cos(), y.sin()
    other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + other * sin


def _turned_backwards(m: Case, x: Tensor, y: Tensor) -> Results:
    first, second = x.chunk(2, -1)
    return x * y.cos() + torch.cat((second, -first), -1) * y.sin()


def _turned_and_read(m: Case, x: Tensor, y: Tensor) -> Results:
    result = turned(x, y.cos(), y.sin())
    return result, norm(result, m.weight), x * 2


def _norm_by_keyword(m: Case, x: Tensor, y: Tensor) -> Results:
    wide = torch.add(input=x, other=y).to(dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
    root = torch.rsqrt(input=torch.add(input=wide.pow(exponent=2).mean(dim=-1, keepdim=True), other=1e-5))
    return torch.mul(input=m.weight, other=torch.mul(input=wide, other=root).to(dtype=x.dtype))


def _gate_by_keyword(m: Case, x: Tensor, y: Tensor) -> Results:
    gate, up = torch.chunk(input=m.up(x), chunks=2, dim=-1)
    return torch.mul(input=F.silu(input=gate), other=up), F.gelu(input=gate, approximate="tanh") * up


def _turned_by_keyword(m: Case, x: Tensor, y: Tensor) -> Results:
    first, second = torch.split(tensor=x, split_size_or_sections=WIDTH // 2, dim=-1)
    other = torch.cat(tensors=(torch.neg(input=second), first), dim=-1)
    return torch.add(input=torch.mul(input=x, other=y.cos()), other=torch.mul(input=other, other=y.sin()))


def _quant_by_keyword(m: Case, x: Tensor, y: Tensor) -> Results:
    quotient = torch.div(input=x.to(dtype=torch.float32), other=m.scale)
    return torch.clamp(input=quotient, min=-448.0, max=448.0).to(dtype=torch.float8_e4m3fn).to(dtype=x.dtype)


def _dropout_then_write(m: Case, x: Tensor, y: Tensor) -> Results:
    same = F.dropout(x, 0.5, training=False)
    x.add_(2)
    return same * 1, F.dropout(y, 0.1, False)


def _one_linear_twice(m: Case, x: Tensor, y: Tensor) -> Results:
    return m.query(x) + m.query(x) * m.key(x)


def _linears_by_keyword(m: Case, x: Tensor, y: Tensor) -> Results:
    query = F.linear(x, weight=m.query.weight, bias=m.query.bias)
    return query * F.linear(input=x, weight=m.key.weight, bias=m.key.bias), m.value(x) * 2


def _linears_at_ranks(m: Case, x: Tensor, y: Tensor) -> Results:
    return m.query(x[None]) * m.key(x[None]) + m.key(x)[:, None].sum(1)


def _linears_by_matmul(m: Case, x: Tensor, y: Tensor) -> Results:
    return (x @ m.query.weight.t()) * (x @ m.key.weight.t())


def _linears_of_a_view_of_a_result(m: Case, x: Tensor, y: Tensor) -> Results:
    query, key = m.query(x), m.key(x)
    return query.view(-1, 2, WIDTH // 2).transpose(0, 1).reshape(2, -1) * 2, key.flatten(), query.t().contiguous()


# Neighbours of those above, the other way round: another spelling, another dimension, another place of a cast.
MERGE = "merge_linears_everywhere"
NEAR: dict[str, tuple[Forward, dict[str, int]]] = {
    "a norm without a weight": (lambda m, x, y: norm(x, None), {"find_norms": 1}),
    "a norm over tokens": (lambda m, x, y: rows_of(x, lambda w: w.pow(2).mean(0, keepdim=True)), {"find_norms": 0}),
    "a norm over all": (lambda m, x, y: rows_of(x, lambda w: w.pow(2).mean()), {"find_norms": 0}),
    "a norm over a part": (
        lambda m, x, y: rows_of(x, lambda w: w[:, :4].pow(2).mean(-1, keepdim=True)), {"find_norms": 0}),
    "a mean that is given its dimension again": (
        lambda m, x, y: rows_of(x, lambda w: w.pow(2).mean(-1).unsqueeze(-1)), {"find_norms": 1}),
    "a mean that is a sum": (lambda m, x, y: rows_of(x, lambda w: w.pow(2).sum(-1, True) / WIDTH), {"find_norms": 1}),
    "a mean of a third power": (
        lambda m, x, y: rows_of(x, lambda w: w.pow(3).abs().mean(-1, keepdim=True)), {"find_norms": 0}),
    "a square that is a product": (
        lambda m, x, y: rows_of(x, lambda w: (w * w).mean(-1, keepdim=True)), {"find_norms": 1}),
    "a square of another row": (
        lambda m, x, y: rows_of(x, lambda w: (y * w).abs().mean(-1, keepdim=True)), {"find_norms": 0}),
    "a norm in the row's own dtype": (
        lambda m, x, y: m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), {"find_norms": 0}),
    "a norm by a root outside": (
        lambda m, x, y: m.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5)), {"find_norms": 0}),
    "a norm with a weight of one more": (lambda m, x, y: norm(x, m.weight + 1), {"find_norms": 1}),
    "torch's own norm": (lambda m, x, y: F.rms_norm(x, (WIDTH,), m.weight, 1e-5), {"find_norms": 1}),
    "torch's own norm without a weight": (lambda m, x, y: F.rms_norm(x + y, (WIDTH,)), {"find_norms": 1}),
    "a norm about its mean": (lambda m, x, y: F.layer_norm(x + y, (WIDTH,), m.weight), {"find_norms": 0}),
    "a norm in place": (_norm_in_place, {"find_norms": 0}),
    "a residual that is used twice": (_residual_twice, {"find_norms": 2, "fuse_add_norm": 1}),
    "a residual of a residual": (_residual_of_residual, {"fuse_add_norm": 2}),
    "a sum in place, written later": (_residual_in_place_then_read, {"fuse_add_norm": 0}),
    "two norms of two epsilons": (_two_eps, {"find_norms": 2, "fuse_add_norm": 2}),
    "a gate spelled by its sigmoid": (lambda m, x, y: _sigmoid_of(x) * y, {"find_gates": 0}),
    "a gate in place": (_gate_in_place, {"find_gates": 0}),
    "a gate of the second half": (_gate_other_way, {"find_gates": 1}),
    "a gate of uneven parts": (_gate_uneven, {"find_gates": 1}),
    "a gate of parts that overlap": (_gate_overlapping, {"find_gates": 1}),
    "a gate by the exact function": (lambda m, x, y: F.gelu(x) * y, {"find_gates": 1}),
    "a quantisation by row": (_quant_of_rows, {"find_quants": 1}),
    "a quantisation by column": (lambda m, x, y: _quant_of_rows(m, x, y, 0), {}),
    "a quantisation by all": (lambda m, x, y: _quant_of_rows(m, x, y, None), {}),
    "a norm quantised by row": (
        lambda m, x, y: _quant_of_rows(m, norm(x + y, m.weight), y), {"fuse_add_norm": 1, "fuse_quant": 0}),
    "a gate quantised by row": (
        lambda m, x, y: _quant_of_rows(m, F.silu(x) * y, y), {"find_gates": 1, "fuse_quant": 0}),
    "a quantisation by a reciprocal": (_quant_by_reciprocal, {"find_quants": 0}),
    "a quantisation without bounds": (_quant_bare, {"find_quants": 0}),
    "a quantisation to the wider range": (_quant_wide, {"find_quants": 0}),
    "a quantisation in the row's own dtype": (_quant_narrow, {"find_quants": 0}),
    "a quotient that is rounded": (_quant_cast_back, {"find_quants": 0}),
    "a turn of neighbours": (_turned_between, {"find_rotary": 1}),
    "a turn backwards": (_turned_backwards, {"find_rotary": 0}),
    "a turn that is read again": (_turned_and_read, {"find_rotary": 1}),
    "a norm by keyword": (_norm_by_keyword, {"find_norms": 0}),
    "a gate by keyword": (_gate_by_keyword, {"find_gates": 0}),
    "a turn by keyword": (_turned_by_keyword, {"find_rotary": 0}),
    "a quantisation by keyword": (_quant_by_keyword, {"find_quants": 0}),
    "dropout that is off, written later": (_dropout_then_write, {}),
    "one linear twice": (_one_linear_twice, {MERGE: 0}),
    "linears by keyword": (_linears_by_keyword, {MERGE: 1}),
    "linears of a row more": (_linears_at_ranks, {MERGE: 0}),
    "linears as products": (_linears_by_matmul, {MERGE: 0}),
    "linears whose views are copied": (_linears_of_a_view_of_a_result, {MERGE: 1}),
}  # fmt: skip
