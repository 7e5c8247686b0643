"""Models that nearly are what a pass looks for: each gives what eager gives, whatever was matched or left alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_models import Case, Forward, Results, norm, quantised, turned
from piecework import ops


def _norm_then_write(m: Case, x: Tensor, y: Tensor) -> Results:
    normed = norm(x, m.weight)
    x.add_(1)
    return normed, x * 2


def _written_between(m: Case, x: Tensor, y: Tensor) -> Results:
    z = x * 1.5
    root = torch.rsqrt(z.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    z.mul_(3)
    return m.weight * (z.float() * root).to(z.dtype)


def _sum_written_later(m: Case, x: Tensor, y: Tensor) -> Results:
    total = x + y
    normed = norm(total, m.weight)
    total.add_(normed)
    return normed, total, total.view(-1)


def _sum_in_place(m: Case, x: Tensor, y: Tensor) -> Results:
    y += x
    return norm(y, m.weight), y.t()


def _gate_written(m: Case, x: Tensor, y: Tensor) -> Results:
    both = m.up(x)
    gate, up = both.chunk(2, -1)
    active = F.silu(gate)
    both.mul_(2)
    return active * up


def _rotary_over_itself(m: Case, x: Tensor, y: Tensor) -> Results:
    x.copy_(turned(x, y.cos(), y.sin()))
    return x + 1


def _linears_of_views(m: Case, x: Tensor, y: Tensor) -> Results:
    return m.query(x) + m.key(x.view(x.shape)) * m.value(x.contiguous())


def _linears_written(m: Case, x: Tensor, y: Tensor) -> Results:
    query, key = m.query(x), m.key(x)
    torch.relu_(query)
    return query, key[:, 1:3], query * key


def _casts_written(m: Case, x: Tensor, y: Tensor) -> Results:
    same = x.to(x.dtype).contiguous().view_as(x)
    same.add_(2)
    return x * 1, F.dropout(same, 0.5, training=False)


def _two_readers(m: Case, x: Tensor, y: Tensor) -> Results:
    scale = m.scale * 2
    rows = norm(x, m.weight)
    return quantised(rows, scale), quantised(rows, m.scale), scale.sum() + rows


def _tied(m: Case, x: Tensor, y: Tensor) -> Results:
    return m.query(x) * F.linear(x, m.table.weight) + m.table.weight[0]


def _of_a_part(m: Case, x: Tensor, y: Tensor) -> Results:
    return m.query(x) + F.linear(x, m.wide[:8, None].expand(8, 8))


# What is written, and how often a pass matches where that is to be said.
MERGE = "merge_linears_everywhere"
CASES: dict[str, tuple[Forward, dict[str, int]]] = {
    "a residual of a wider dtype": (lambda m, x, y: norm(x + y.float(), m.weight), {"fuse_add_norm": 0}),
    "a weight that is part of another": (lambda m, x, y: norm(x, m.wide[4:12]), {"find_norms": 1}),
    "a weight that is read elsewhere": (lambda m, x, y: norm(x, m.weight) + m.weight * y, {"find_norms": 1}),
    "a weight that is an input": (lambda m, x, y: norm(x, y[0]), {"find_norms": 1}),
    "a weight for each row": (lambda m, x, y: norm(x, y), {"find_norms": 1}),
    "a row that is written after its norm": (_norm_then_write, {}),
    "a row that is written within its norm": (_written_between, {"find_norms": 0}),
    "a sum that is written after its norm": (_sum_written_later, {}),
    "a sum in place": (_sum_in_place, {}),
    "a sum twice": (lambda m, x, y: norm(x + y, m.weight) * norm(x + y, m.weight), {}),
    "a sum with a factor": (lambda m, x, y: norm(torch.add(x, y, alpha=2), m.weight), {"fuse_add_norm": 0}),
    "a sum with a number": (lambda m, x, y: norm(x + 1, m.weight), {"fuse_add_norm": 0}),
    "a sum with one row": (lambda m, x, y: norm(x + y[:1], m.weight), {"fuse_add_norm": 0}),
    "a gate of itself": (lambda m, x, y: F.silu(x) * x, {"find_gates": 0}),
    "a gate over one row": (lambda m, x, y: F.silu(x) * y[:1], {"find_gates": 0}),
    "a gate of a wider dtype": (lambda m, x, y: F.gelu(x.float(), approximate="tanh") * y, {"find_gates": 0}),
    "a gate that is returned": (lambda m, x, y: (F.silu(x), F.silu(x) * y), {}),
    "a gate that is written": (_gate_written, {}),
    "a turn of wider angles": (lambda m, x, y: turned(x, y.float().cos(), y.float().sin()), {}),
    "a turn over itself": (_rotary_over_itself, {}),
    "a turn by one and the same": (lambda m, x, y: turned(x, y, y), {}),
    "other bounds": (lambda m, x, y: quantised(x, m.scale, 240.0), {"find_quants": 0}),
    "two scales, one of them read": (_two_readers, {"fuse_quant": 0}),
    "linears of views of one value": (_linears_of_views, {MERGE: 1}),
    "a linear that is written": (_linears_written, {MERGE: 0}),
    "linears that are returned": (lambda m, x, y: (m.query(x), m.key(x), m.query(x).t()), {MERGE: 0}),
    "a tied linear": (_tied, {MERGE: 0}),
    "a linear of part of a weight": (_of_a_part, {MERGE: 0}),
    "linears of one and a written value": (lambda m, x, y: m.query(x) + m.key(x.add_(1)), {MERGE: 0}),
    "casts of the dtype that are written": (_casts_written, {}),
    "our norm of a view": (lambda m, x, y: ops.rms_norm(torch.stack((x, y), -1)[..., 0], m.weight, 1e-5), {}),
}  # fmt: skip
