"""The paged cache of one site: pages of keys and values at a fixed address."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Geometry(NamedTuple):
    """How keys lie in pages, and values like them; strides in elements."""

    kv_heads: int
    head_dim: int
    page_size: int
    page_stride: int
    slot_stride: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys and values of one site, in pages.

    Tensors:
        pages                   [2, P, S, K, D]  model  keys, then values; MUTATED by `kv_update`; fixed address
        key_pages, value_pages  [P, S, K, D]     model  views of `pages`
        key_rows, value_rows    [P * S, K, D]    model  the same with all slots in a row
    """

    pages: Tensor

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> PagedCache:
        """Allocate zeroed pages: a slot that was never written must not bring a NaN into a masked product."""
        return cls(torch.zeros(2, num_pages, page_size, num_kv_heads, head_dim, dtype=dtype, device=device))

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]

    @cached_property
    def page_size(self) -> int:
        return self.pages.shape[2]

    @property
    def size_bytes(self) -> int:
        return self.pages.numel() * self.pages.element_size()

    @cached_property
    def row_shape(self) -> tuple[int, int]:
        """[K, D] of one token."""
        return (self.pages.shape[3], self.pages.shape[4])

    @cached_property
    def geometry(self) -> Geometry:
        """What launches over the pages depend on, beside their address."""
        page_stride, slot_stride = self.pages.stride(1), self.pages.stride(2)
        return Geometry(*self.row_shape, self.page_size, page_stride, slot_stride, self.pages.dtype)

    # The views are made once: a decode step would otherwise spend more on them than on its products.
    @cached_property
    def key_pages(self) -> Tensor:
        return self.pages[0]

    @cached_property
    def value_pages(self) -> Tensor:
        return self.pages[1]

    @cached_property
    def key_rows(self) -> Tensor:
        """All slots in a row: [P * S, K, D]."""
        return self.pages[0].flatten(0, 1)

    @cached_property
    def value_rows(self) -> Tensor:
        return self.pages[1].flatten(0, 1)
