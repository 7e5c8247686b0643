"""A step's reads and writes: as host integers, made once a step and used by every layer, or left on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from piecework.errors import StepError

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Writes:
    """Where rows of keys and values go.

    Tensors:
        slots  [n]  i64  slots written; None where they are `count` in a row from `start`
        rows   [n]  i64  rows of the step they come from; None where these are the first rows, in order
    """

    count: int
    start: int = 0
    slots: Tensor | None = None
    rows: Tensor | None = None


@dataclass(frozen=True)
class Span:
    """One sequence of a step: its rows, its length afterwards, and its pages."""

    first: int
    last: int
    length: int
    pages: tuple[int, ...]
    in_order: bool  # the pages lie one after another, so that a slice serves and nothing is gathered

    @property
    def num_rows(self) -> int:
        return self.last - self.first

    @property
    def start(self) -> int:
        """The position in its sequence of the span's first row."""
        return self.length - self.num_rows


@dataclass(frozen=True)
class Layout:
    """All that bodies on the host need to know of one step, for pages of one size."""

    page_size: int
    num_tokens: int
    slots: tuple[int, ...]
    writes: Writes
    spans: tuple[Span, ...]
    device: torch.device
    masks: dict[tuple[int, int, int, int, int], Tensor] = field(default_factory=dict)
    gathers: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    plans: dict[Hashable, Any] = field(default_factory=dict)

    def plan(self, name: Hashable, make: Callable[[Layout], Plan]) -> Plan:
        """Return what a backend makes of the layout: made by its first layer, read by all."""
        if name not in self.plans:
            self.plans[name] = make(self)
        found: Plan = self.plans[name]
        return found

    def mask(self, rows: int, first_position: int, keys: int, first_key: int, window: int) -> Tensor:
        """Say which keys each row sees, counted from `first_key`; layers of one kind share it.

        Tensors:
            ->  [N, L]  bool
        """
        at = (rows, first_position, keys, first_key, window)
        found = self.masks.get(at)
        if found is None:
            query_position = torch.arange(first_position, first_position + rows, device=self.device)[:, None]
            key_position = torch.arange(first_key, first_key + keys, device=self.device)[None, :]
            found = key_position <= query_position
            if window:
                found = found & (key_position > query_position - window)
            self.masks[at] = found
        return found

    def page_index(self, span_index: int, first_page: int, last_page: int) -> Tensor:
        """Return the numbers of some of a sequence's pages as an index.

        Tensors:
            ->  [N]  i64
        """
        at = (span_index, first_page, last_page)
        found = self.gathers.get(at)
        if found is None:
            found = torch.tensor(self.spans[span_index].pages[first_page:last_page], device=self.device)
            self.gathers[at] = found
        return found


@dataclass(frozen=True)
class DeviceLayout:
    """A decode step of one row a sequence whose numbers stay on the device: a graph reads them anew at each replay.

    Nothing of it is known to the host but shapes. A sequence of length 0 is padding, and so is a slot below 0.

    Tensors:
        slots             [T]     i32
        sequence_lengths  [B]     i32  B equals T
        page_table        [B, M]  i32
    """

    page_size: int
    slots: Tensor
    sequence_lengths: Tensor
    page_table: Tensor


def lay_out(
    *,
    slots: Sequence[int],
    query_starts: Sequence[int],
    sequence_lengths: Sequence[int],
    page_table: Sequence[Sequence[int]],
    num_tokens: int,
    page_size: int,
    device: torch.device,
) -> Layout:
    """Turn a step's integers into slices where they are consecutive, and into indices where they are not."""
    _check(slots, query_starts, sequence_lengths, page_table, num_tokens, page_size)
    return Layout(
        page_size=page_size,
        num_tokens=num_tokens,
        slots=tuple(slots),
        writes=_plan_writes(slots[:num_tokens], device),
        spans=tuple(
            _plan_span(query_starts[b], query_starts[b + 1], sequence_lengths[b], page_table[b], page_size)
            for b in range(len(sequence_lengths))
        ),
        device=device,
    )


def _plan_span(first: int, last: int, length: int, pages: Sequence[int], page_size: int) -> Span:
    used = tuple(pages[: -(-length // page_size)])
    in_order = all(after == before + 1 for before, after in zip(used, used[1:], strict=False))
    return Span(first, last, length, used, in_order)


def _plan_writes(slots: Sequence[int], device: torch.device) -> Writes:
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    if not rows:
        return Writes(count=0)
    kept = [slots[row] for row in rows]
    skipped = len(rows) != len(slots)
    if not skipped and kept == list(range(kept[0], kept[0] + len(kept))):
        return Writes(count=len(kept), start=kept[0])
    return Writes(
        count=len(kept),
        slots=torch.tensor(kept, device=device),
        rows=torch.tensor(rows, device=device) if skipped else None,
    )


def _check(
    slots: Sequence[int],
    query_starts: Sequence[int],
    sequence_lengths: Sequence[int],
    page_table: Sequence[Sequence[int]],
    num_tokens: int,
    page_size: int,
) -> None:
    if len(query_starts) != len(sequence_lengths) + 1 or len(page_table) != len(sequence_lengths):
        raise StepError(
            f"a step of {len(sequence_lengths)} sequences has {len(query_starts)} query starts "
            f"and a page table of {len(page_table)} rows",
            hint="`query_starts` has one entry more than there are sequences, the page table as many",
        )
    if query_starts[-1] != num_tokens or num_tokens > len(slots):
        raise StepError(
            f"a step of {num_tokens} tokens has query starts up to {query_starts[-1]} and {len(slots)} slots",
            hint="`query_starts` ends at `num_tokens`, and there is a slot for each row, padding included",
        )
    for b, length in enumerate(sequence_lengths):
        rows = query_starts[b + 1] - query_starts[b]
        if not 0 <= rows <= length:
            raise StepError(
                f"sequence {b} brings {rows} rows to a length of {length}",
                hint="`sequence_lengths` counts the tokens after the step, this step's included",
            )
        if length > len(page_table[b]) * page_size:
            raise StepError(
                f"sequence {b} has {length} tokens and {len(page_table[b])} pages of {page_size}",
                hint="give the sequence as many pages as its length needs before the step",
            )
