"""A model of Llama's shape with random weights, its attention opaque over a paged cache: the common work on a GPU.

Two attention operators of the same meaning: `attend` fills an output that it is given, `attend_fresh` returns memory of
its own. Sequence b's pages lie one after another, so that keys are read by a view and nothing is gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piecework.ops.cache import PagedCache
from piecework.ops.step import Step
from piecework.values.declaration import split_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is for trying a script, not for its figures
DYNAMIC = {"ids": {0: "tokens"}, "positions": {0: "tokens"}}


@dataclass(frozen=True)
class Shape:
    """How large a model is."""

    layers: int = 32
    hidden: int = 4096
    feed_forward: int = 14336
    heads: int = 32
    kv_heads: int = 8
    words: int = 128256

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


LLAMA_8B = Shape()
TINY = Shape(layers=4, hidden=256, feed_forward=512, heads=8, kv_heads=2, words=512)


@dataclass
class Metadata:
    """A decode step's metadata, one token a sequence, at fixed addresses, and the caches of all layers.

    Tensors:
        slots    [B]              i64  row * L + position of each row's token; the last row of a cache takes padding
        lengths  [B]              i64  tokens of each sequence, this step's included
        keys, values  [B+1, L, K, D]  model  one pair a layer; MUTATED
    """

    slots: Tensor
    lengths: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    is_masked: bool
    scratch: int = field(init=False)

    def __post_init__(self) -> None:
        self.scratch = (self.keys[0].shape[0] - 1) * self.keys[0].shape[1]

    @classmethod
    def allocate(cls, shape: Shape, sequences: int, length: int, dtype: torch.dtype, *, is_masked: bool) -> Metadata:
        """Allocate caches filled with noise, and a step in which every sequence has `length` tokens."""
        pages = (sequences + 1, length, shape.kv_heads, shape.head_dim)
        caches = [[torch.randn(pages, device=DEVICE, dtype=dtype) for _ in range(shape.layers)] for _ in range(2)]
        rows = torch.arange(sequences, device=DEVICE)
        lengths = torch.full((sequences,), length, device=DEVICE)
        return cls(rows * length + length - 1, lengths, caches[0], caches[1], is_masked)

    def set(self, lengths: list[int]) -> None:
        """Give the first sequences these lengths; rows beyond are padding, written to where nothing reads."""
        count, most = len(lengths), self.keys[0].shape[1]
        given = torch.tensor(lengths, device=DEVICE)
        self.lengths.fill_(1)
        self.lengths[:count] = given
        self.slots.fill_(self.scratch)
        self.slots[:count] = torch.arange(count, device=DEVICE) * most + given - 1


_METADATA: ContextVar[Metadata | None] = ContextVar("llama_shape_metadata", default=None)


@contextlib.contextmanager
def metadata(step: Metadata) -> Iterator[None]:
    """Make a step's metadata the one that attention sees."""
    token = _METADATA.set(step)
    try:
        yield
    finally:
        _METADATA.reset(token)


# cuDNN's attention, which torch takes first for this layout, gives other bits from run to run (seen on an H200).
torch.backends.cuda.enable_cudnn_sdp(False)


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
    step = _METADATA.get()
    assert step is not None, "attention ran outside a step"
    rows, heads, width = query.shape
    keys, values = step.keys[layer], step.values[layer]
    if rows >= keys.shape[0]:  # more rows than sequences: the tokens of one prompt, which see one another
        own = (each.transpose(0, 1)[None] for each in (query, key, value))
        return F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    keys.view(-1, *keys.shape[2:]).index_copy_(0, step.slots[:rows], key)
    values.view(-1, *values.shape[2:]).index_copy_(0, step.slots[:rows], value)
    mask = None
    if step.is_masked:
        mask = (torch.arange(keys.shape[1], device=query.device)[None] < step.lengths[:rows, None])[:, None, None]
    attended = F.scaled_dot_product_attention(
        query.view(rows, heads, 1, width),
        keys[:rows].transpose(1, 2),
        values[:rows].transpose(1, 2),
        mask,
        enable_gqa=True,
    )
    return attended.reshape(rows, heads, width)


@split_op("llama_shape::attend", capture="one_token_decode")
def attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer: int) -> None:
    """Write keys and values, attend, fill `out`.

    Tensors:
        query, out  [T, H, D]  model  out is MUTATED
        key, value  [T, K, D]  model
    """
    out.copy_(_attend(query, key, value, layer))


@split_op("llama_shape::attend_fresh", capture="one_token_decode")
def attend_fresh(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
    """Write keys and values, attend, return fresh memory.

    Tensors:
        query       [T, H, D]  model
        key, value  [T, K, D]  model
        ->          [T, H, D]  model
    """
    return _attend(query, key, value, layer)


_library = torch.library.Library("llama_shape", "DEF")
_library.define("attend(Tensor query, Tensor key, Tensor value, Tensor(a!) out, int layer) -> ()")
_library.define("attend_fresh(Tensor query, Tensor key, Tensor value, int layer) -> Tensor")
for _name, _body in (("attend", attend), ("attend_fresh", attend_fresh)):
    _library.impl(_name, _body, "CompositeExplicitAutograd")
torch.library.register_fake("llama_shape::attend", lambda *_: None, lib=_library)
torch.library.register_fake("llama_shape::attend_fresh", lambda query, *_: torch.empty_like(query), lib=_library)


class Norm(nn.Module):
    """Root-mean-square norm, with the residual added first where there is one."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=DEVICE, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        wide = x.float() if residual is None else x.float() + residual.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight, wide.to(x.dtype)


def _linear(wide: int, narrow: int, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(wide, narrow, bias=False, device="meta")
    weight = torch.empty(narrow, wide, device=DEVICE, dtype=dtype).normal_(0, 0.02)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Layer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, shape: Shape, number: int, dtype: torch.dtype, attention: str, is_apart: bool = False) -> None:
        super().__init__()
        self.shape, self.number, self.attention, self.is_apart = shape, number, attention, is_apart
        self.before, self.after = Norm(shape.hidden, dtype), Norm(shape.hidden, dtype)
        widths = {"q": shape.heads * shape.head_dim, **dict.fromkeys("kv", shape.kv_heads * shape.head_dim)}
        if is_apart:
            widths |= {"gate": shape.feed_forward, "up": shape.feed_forward}
        else:
            widths = {"qkv": sum(widths.values()), "up": 2 * shape.feed_forward}
        for name, width in widths.items():
            setattr(self, name, _linear(shape.hidden, width, dtype))
        self.out = _linear(shape.hidden, shape.hidden, dtype)
        self.down = _linear(shape.feed_forward, shape.hidden, dtype)

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        s = self.shape
        x, residual = self.before(x, residual)
        width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
        if self.is_apart:
            query, key, value = self.q(x), self.k(x), self.v(x)
        else:
            query, key, value = self.qkv(x).split([width, kv_width, kv_width], -1)
        query = _rotate(query.view(-1, s.heads, s.head_dim), cos, sin)
        key = _rotate(key.view(-1, s.kv_heads, s.head_dim), cos, sin)
        value = value.view(-1, s.kv_heads, s.head_dim)
        if self.attention == "fresh":
            attended = torch.ops.llama_shape.attend_fresh(query, key, value, self.number)
        else:
            attended = torch.empty_like(query)
            if self.attention == "paged":
                site = f"layers.{self.number}"
                token = torch.ops.piecework.kv_update(key, value, site)
                torch.ops.piecework.attention(query, token, attended, s.head_dim**-0.5, 0, 0.0, None, site)
            else:
                torch.ops.llama_shape.attend(query, key, value, attended, self.number)
        x, residual = self.after(self.out(attended.view(-1, width)), residual)
        gate, up = (self.gate(x), self.up(x)) if self.is_apart else self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up), residual


class Llama(nn.Module):
    """Embedding, layers, norm, head; the linears of one input are one, or stand `is_apart`.

    `attention` is `filled` (an output that it is given), `fresh` (memory of its own), or `paged`: Piecework's own.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, *, attention: str = "filled", is_apart: bool = False) -> None:
        super().__init__()
        embedding = torch.randn(shape.words, shape.hidden, device=DEVICE, dtype=dtype)
        self.embed = nn.Embedding(shape.words, shape.hidden, _weight=embedding).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(shape, n, dtype, attention, is_apart) for n in range(shape.layers))
        self.norm, self.head = Norm(shape.hidden, dtype), _linear(shape.hidden, shape.words, dtype)
        inverse = 1 / (500000 ** (torch.arange(0, shape.head_dim, 2, device=DEVICE).float() / shape.head_dim))
        angles = torch.arange(2048, device=DEVICE).float()[:, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        return self.head(self.norm(x, residual)[0])


def llama(
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int = 0,
    attention: str = "filled",
    is_apart: bool = False,
) -> Llama:
    """Make a model with random weights on the GPU."""
    torch.manual_seed(seed)
    return Llama(shape, dtype, attention=attention, is_apart=is_apart).eval()


def paged_caches(shape: Shape, num_pages: int, page_size: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Allocate noise for the pages of all layers, by the sites that `paged` attention names."""
    size = (2, num_pages, page_size, shape.kv_heads, shape.head_dim)
    return {f"layers.{n}": PagedCache(torch.randn(size, device=DEVICE, dtype=dtype)) for n in range(shape.layers)}


def paged_step(sites: Mapping[str, Any], sequences: int, length: int, page_size: int, backend: Any) -> Step:
    """Make a decode step in which every sequence has `length` tokens, its pages one after another."""
    pages = -(-length // page_size)
    return Step.from_lists(
        slots=[b * pages * page_size + length - 1 for b in range(sequences)],
        query_starts=list(range(sequences + 1)),
        sequence_lengths=[length] * sequences,
        page_table=[list(range(b * pages, (b + 1) * pages)) for b in range(sequences)],
        sites=sites,
        device=DEVICE,
        backend=backend,
    )


def inputs(shape: Shape, count: int, position: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Make a decode step's token ids and positions."""
    source = torch.Generator(device=DEVICE).manual_seed(seed)
    ids = torch.randint(0, shape.words, (count,), device=DEVICE, generator=source)
    return ids, torch.full((count,), position, device=DEVICE)
