"""A small Llama for tests on a GPU: fused residual norms, rotary embedding, SwiGLU, an opaque attention that copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecework as pw

LIBRARY = torch.library.Library("gpu_toy", "FRAGMENT")
LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, str site) -> ()")


@pw.split_op("gpu_toy::attention", capture="always")
def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, site: str) -> None:
    """Copy the queries: the cost of an opaque call without attention in it."""
    out.copy_(q)


LIBRARY.impl("attention", attention, "CompositeExplicitAutograd")
torch.library.register_fake("gpu_toy::attention", lambda q, k, v, out, site: None, lib=LIBRARY)


class Norm(nn.Module):
    """A root-mean-square norm that adds the residual first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = x.float()
        if residual is not None:
            y = y + residual.float()
        kept = y.to(x.dtype)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.to(x.dtype) * self.weight, kept


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features by their position."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, hidden: int, heads: int, index: int) -> None:
        super().__init__()
        self.heads, self.site = heads, f"layers.{index}"
        self.before, self.after = Norm(hidden), Norm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = self.before(x, residual)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(y).chunk(3, -1))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = torch.empty_like(q)
        torch.ops.gpu_toy.attention(q, k, v, out, self.site)
        y, residual = self.after(self.out(out.flatten(1)), residual)
        gate, up = self.gate_up(y).chunk(2, -1)
        return self.down(F.silu(gate) * up), residual


class ToyLlama(nn.Module):
    """The whole model, head included."""

    def __init__(self, layers: int, hidden: int, heads: int = 4, vocab: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, index) for index in range(layers))
        self.norm, self.head = Norm(hidden), nn.Linear(hidden, vocab, bias=False)
        angles = torch.arange(2048)[:, None] / 10000 ** (torch.arange(0, hidden // heads, 2) / (hidden // heads))
        self.register_buffer("cos", angles.cos(), persistent=True)
        self.register_buffer("sin", angles.sin(), persistent=True)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed(input_ids), None
        cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        return self.head(self.norm(x, residual)[0])


def example(size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return token ids and positions, the same for one size."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 512, (size,), generator=generator).to(device), torch.arange(size, device=device)
