"""A toy Llama: the common work of the benchmarks, small enough that what is timed is the layer around it.

Each layer is RMSNorm with a fused residual, rotary positions, grouped-query projections, SwiGLU, and an attention
operator that no compiler can look into. The operator mutates its `out` argument and is told its layer's name, which is
how serving engines call theirs; its body is one copy, so that the host cost of a call is nearly all that is left.

    toy_bench::attention(query, key, value, out!, layer_name)
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

OPERATOR = "toy_bench::attention"


def attention_body(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    """Copy the query to `out`: the cheapest body that still does what its schema says.

    Tensors:
        query       [T, E]  model  H heads side by side
        key, value  [T, K * D]  model  not read
        out         [T, E]  model  MUTATED in place
    """
    out.copy_(query)


def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    return None


# Kept for as long as the process lives: an operator goes when its library object does.
_library = torch.library.Library("toy_bench", "FRAGMENT")
_library.define("attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, str layer_name) -> ()")
_library.impl("attention", attention_body, "CPU")
_library.impl("attention", attention_body, "CUDA")
torch.library.register_fake(OPERATOR, _attention_fake, lib=_library)


@dataclasses.dataclass(frozen=True)
class ToyShape:
    """Say how large the toy is."""

    layers: int = 32
    hidden: int = 16
    intermediate: int = 32
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256
    max_positions: int = 8192
    epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class ToyNorm(nn.Module):
    """Normalise by the root mean square, adding the residual first where there is one."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual_TE is not None:
            hidden_TE = hidden_TE + residual_TE
        wide_TE = hidden_TE.float()
        wide_TE = wide_TE * torch.rsqrt(wide_TE.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return wide_TE.to(hidden_TE.dtype) * self.weight, hidden_TE


def rotate(heads_THD: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn each head by its token's position.

    Tensors:
        heads_THD     [T, H, D]  model
        cosine, sine  [T, 1, D / 2]  model
        ->            [T, H, D]  model
    """
    first, second = heads_THD.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class ToyAttention(nn.Module):
    """Project, rotate, attend through the opaque operator, project back."""

    def __init__(self, shape: ToyShape, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = shape.heads, shape.kv_heads, shape.head_size
        self.widths = [shape.hidden, shape.kv_heads * shape.head_size, shape.kv_heads * shape.head_size]
        self.query_key_value = nn.Linear(shape.hidden, sum(self.widths), bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.layer_name = f"layers.{index}.attention"

    def forward(self, hidden_TE: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden_TE.shape[0]
        query, key, value = self.query_key_value(hidden_TE).split(self.widths, dim=-1)
        query = rotate(query.view(num_tokens, self.heads, self.head_size), cosine, sine).reshape(num_tokens, -1)
        key = rotate(key.view(num_tokens, self.kv_heads, self.head_size), cosine, sine).reshape(num_tokens, -1)
        out = torch.empty_like(query)
        torch.ops.toy_bench.attention(query, key, value.contiguous(), out, self.layer_name)
        return self.output(out)


class ToyFeedForward(nn.Module):
    """Apply SwiGLU."""

    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden_TE).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class ToyLayer(nn.Module):
    """Run one decoder layer."""

    def __init__(self, shape: ToyShape, index: int) -> None:
        super().__init__()
        self.attention_norm = ToyNorm(shape.hidden, shape.epsilon)
        self.attention = ToyAttention(shape, index)
        self.feed_forward_norm = ToyNorm(shape.hidden, shape.epsilon)
        self.feed_forward = ToyFeedForward(shape)

    def forward(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TE, residual_TE = self.attention_norm(hidden_TE, residual_TE)
        hidden_TE = self.attention(hidden_TE, cosine, sine)
        hidden_TE, residual_TE = self.feed_forward_norm(hidden_TE, residual_TE)
        return self.feed_forward(hidden_TE), residual_TE


class ToyLlama(nn.Module):
    """Map token ids and positions to hidden states."""

    def __init__(self, shape: ToyShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(ToyLayer(shape, index) for index in range(shape.layers))
        self.norm = ToyNorm(shape.hidden, shape.epsilon)
        exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
        angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), 10000.0**-exponents)
        self.register_buffer("cosine", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sine", angles.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run all layers.

        Tensors:
            input_ids  [T]     i64
            positions  [T]     i64
            ->         [T, E]  model
        """
        hidden_TE = self.embedding(input_ids)
        cosine = self.cosine[positions].unsqueeze(1)
        sine = self.sine[positions].unsqueeze(1)
        residual_TE = None
        for layer in self.layers:
            hidden_TE, residual_TE = layer(hidden_TE, residual_TE, cosine, sine)
        hidden_TE, _ = self.norm(hidden_TE, residual_TE)
        return hidden_TE


def fill_weights(model: nn.Module, seed: int = 0) -> None:
    """Give every matrix seeded random values of unit gain, the same in every process and under every stack."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
