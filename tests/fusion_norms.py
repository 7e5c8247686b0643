"""Norms however they are spelled: the same operator where they are the same function, and left alone elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_models import WIDTH, Case, Forward, Results

EPS = 1e-5


def _wide_of(x: Tensor) -> Tensor:
    return x.float() if x.dtype is not torch.float64 else x


def by(scaled: Callable[[Tensor], Tensor], weight_after: bool = True) -> Forward:
    """Make a norm of how it scales its row, weighed before or after it is rounded."""

    def forward(m: Case, x: Tensor, y: Tensor) -> Results:
        row = scaled(_wide_of(x))
        return m.weight * row.to(x.dtype) if weight_after else (row * m.weight.to(row.dtype)).to(x.dtype)

    return forward


def promoted(m: Case, x: Tensor, y: Tensor) -> Results:
    """Scale the narrow row by a float32 root, as the family of T5 does."""
    row = x * torch.rsqrt(_wide_of(x).pow(2).mean(-1, keepdim=True) + EPS)
    return m.weight * row.to(m.weight.dtype)


def _read_twice(m: Case, x: Tensor, y: Tensor) -> Results:
    wide = _wide_of(x)
    size = wide.square().sum(-1) / WIDTH
    return (wide * torch.rsqrt(size + EPS)[:, None]).to(x.dtype), size.to(x.dtype)


def _module_of_torch(m: Case, x: Tensor, y: Tensor) -> Results:
    total = x + y
    return F.rms_norm(total, (WIDTH,), m.weight), total


# The same function: each is one operator.
SAME: dict[str, Forward] = {
    "a dimension given to the mean": by(lambda w: w * torch.rsqrt(w.pow(2).mean(-1).unsqueeze(-1) + EPS)),
    "a dimension given to the sum": by(lambda w: w * torch.rsqrt((w.pow(2).mean(-1) + EPS)[..., None])),
    "a dimension given to the root": by(lambda w: w * torch.rsqrt(w.pow(2).mean(1) + EPS)[:, None], False),
    "a sum over a width": by(lambda w: w * torch.rsqrt(w.pow(2).sum(-1, keepdim=True) / w.shape[-1] + EPS)),
    "a sum over a width, given its dimension": by(
        lambda w: w * torch.rsqrt((w * w).sum(-1).unsqueeze(-1) / WIDTH + EPS), False),
    "a power": by(lambda w: w * torch.pow(w.pow(2).mean(-1, keepdim=True) + EPS, -0.5), False),
    "a quotient": by(lambda w: w / torch.sqrt(w.pow(2).mean(-1, keepdim=True) + EPS)),
    "a quotient by a power": by(lambda w: w / (w.pow(2).mean(-1, keepdim=True) + EPS) ** 0.5),
    "an inverse": by(lambda w: w * (1 / torch.sqrt(w.pow(2).mean(-1, keepdim=True) + EPS))),
    "a reciprocal": by(lambda w: torch.sqrt(w.square().mean(-1) + EPS).reciprocal().unsqueeze(1) * w),
    "a part of the row": by(lambda w: w * torch.rsqrt(w[..., :4].square().mean(-1)[..., None] + EPS)),
    "a row that is promoted": promoted,
    "torch's own": lambda m, x, y: F.rms_norm(x, (WIDTH,), m.weight, EPS),
    "torch's own without a weight": lambda m, x, y: F.rms_norm(x, (WIDTH,)),
    "torch's own of a sum that is read": _module_of_torch,
    "torch's own of a part": lambda m, x, y: F.rms_norm(m.up(x)[:, 4 : 4 + WIDTH], (WIDTH,), m.weight, EPS),
}  # fmt: skip
# Other functions, or places where the values between are read.
OTHER: dict[str, Forward] = {
    "a dimension of another": by(lambda w: (w.T * torch.rsqrt(w.pow(2).mean(-1) + EPS)).T),
    "a sum over another width": by(lambda w: w * torch.rsqrt(w.pow(2).sum(-1, True) / (WIDTH - 1) + EPS)),
    "a sum over nothing": by(lambda w: w * torch.rsqrt(w.pow(2).sum(-1, True) + EPS)),
    "an inverse the other way round": by(lambda w: torch.sqrt(w.pow(2).mean(-1, keepdim=True) + EPS) / w),
    "a root that multiplies": by(lambda w: w * torch.sqrt(w.pow(2).mean(-1, keepdim=True) + EPS)),
    "a root that divides twice": by(lambda w: w / torch.rsqrt(w.pow(2).mean(-1, keepdim=True) + EPS)),
    "a root added outside": by(lambda w: w / (w.pow(2).mean(-1, keepdim=True).sqrt() + EPS)),
    "a root of a twice": by(lambda w: w * (2 / torch.sqrt(w.pow(2).mean(-1, keepdim=True) + EPS))),
    "a dimension in front": by(lambda w: (w[None] * torch.rsqrt(w.pow(2).mean(-1, True) + EPS).unsqueeze(0))[0]),
    "a mean that is read": _read_twice,
    "torch's own over two dimensions": lambda m, x, y: F.rms_norm(x.view(-1, 2, 4), (2, 4)).flatten(1),
    "a row turned and returned": lambda m, x, y: by(lambda w: w * torch.rsqrt(w.pow(2).mean(-1, True) + EPS))(
        m, m.up(x).view(-1, 2, WIDTH).transpose(0, 1), y),
    "torch's own of a turned row": lambda m, x, y: F.rms_norm(
        m.up(x).view(-1, 2, WIDTH).transpose(0, 1), (WIDTH,), m.weight),
    "a root in the row's own dtype": lambda m, x, y: x * torch.rsqrt(
        _wide_of(x).square().mean(-1, keepdim=True) + EPS).to(x.dtype),
}  # fmt: skip
SPELLED = {name: (each, {"find_norms": 1}) for name, each in SAME.items()}
SPELLED |= {name: (each, {"find_norms": 0}) for name, each in OTHER.items()}
