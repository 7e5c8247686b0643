"""What an opaque body needs of the step it runs in: slots, lengths, pages, and the cache of its site.

The values of a step are no arguments of the graph: nothing in them is traced, guarded or keyed. A body asks for them
by its own name and its site's. They stand in a `ContextVar`, so two threads, and two programs inside one another,
never see each other's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from piecework.errors import StepError
from piecework.ops.cache import PagedCache
from piecework.ops.layout import DeviceLayout, Layout, lay_out
from piecework.ops.numbers import on_device
from piecework.ops.reference import AttentionBackend, ReferenceAttention

Hook = Callable[[str, str], None]
"""Called with the operator's name and the site's, before or after a body: where a transfer of keys and values waits."""


@dataclass(frozen=True)
class RowSpan:
    """One sequence's rows of a step, the position in its sequence of the first, and the slot of its state."""

    first: int
    last: int
    start: int
    slot: int


@dataclass(frozen=True)
class StepLists:
    """A step's numbers on the host."""

    slots: Sequence[int]
    query_starts: Sequence[int]
    sequence_lengths: Sequence[int]
    page_table: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Step:
    """One pass over flat tokens: which rows belong to which sequence, and where their keys and values live.

    Tensors:
        slots             [T]     i32  page * S + offset of each row's token; -1 marks padding
        query_starts      [B+1]   i32  rows query_starts[b] to query_starts[b+1] belong to sequence b
        sequence_lengths  [B]     i32  tokens of each sequence once this step is done
        page_table        [B, M]  i32  the pages of each sequence, in order; unused places hold anything
        state_slots       [B]     i32  where each sequence's recurrent state lies; None: sequence b has slot b

    `num_tokens` is the true count of rows: rows from there on are padding. `sites` holds what each site's body works
    on: a `PagedCache` (or its bare tensor) for our own operators, any object for a user's. A step that `is_static` is
    one decode step after another, copied to the same addresses: what a full graph reads.
    """

    slots: Tensor
    query_starts: Tensor
    sequence_lengths: Tensor
    page_table: Tensor
    num_tokens: int
    sites: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    before: tuple[Hook, ...] = ()
    after: tuple[Hook, ...] = ()
    backend: AttentionBackend = field(default_factory=ReferenceAttention)
    state_slots: Tensor | None = None
    is_static: bool = False

    @classmethod
    def from_lists(
        cls,
        *,
        slots: Sequence[int],
        query_starts: Sequence[int],
        sequence_lengths: Sequence[int],
        page_table: Sequence[Sequence[int]],
        sites: Mapping[str, Any],
        num_padded: int = 0,
        device: str | torch.device = "cpu",
        before: tuple[Hook, ...] = (),
        after: tuple[Hook, ...] = (),
        backend: AttentionBackend | None = None,
        state_slots: Sequence[int] | None = None,
    ) -> Step:
        """Make a step from host integers, padding the slots to `num_padded` rows."""
        lists = StepLists(
            [*slots, *[-1] * max(0, num_padded - len(slots))], query_starts, sequence_lengths, page_table
        )
        states = () if state_slots is None else state_slots
        tensors = _as_tensors(lists, states, torch.device(device))
        step = cls(
            slots=tensors[0],
            query_starts=tensors[1],
            sequence_lengths=tensors[2],
            page_table=tensors[3],
            num_tokens=len(slots),
            sites=sites,
            before=before,
            after=after,
            backend=backend or ReferenceAttention(),
            state_slots=None if state_slots is None else tensors[4],
        )
        vars(step)["lists"] = lists  # known here: reading them back would wait for the device
        return step

    @cached_property
    def lists(self) -> StepLists:
        """The step's numbers on the host."""
        return StepLists(
            self.slots.tolist(), self.query_starts.tolist(), self.sequence_lengths.tolist(), self.page_table.tolist()
        )

    @cached_property
    def _layouts(self) -> dict[int, Layout | DeviceLayout]:
        return {}

    def layout(self, page_size: int) -> Layout | DeviceLayout:
        """Plan reads and writes for pages of one size: once a step, whatever the number of layers.

        On the host, but for a static step: what is planned there would be the plan of one step alone.
        """
        found = self._layouts.get(page_size)
        if found is None:
            found = self._lay_out(page_size)
            self._layouts[page_size] = found
        return found

    def _lay_out(self, page_size: int) -> Layout | DeviceLayout:
        if self.is_static:
            return DeviceLayout(page_size, self.slots, self.sequence_lengths, self.page_table)
        return lay_out(
            slots=self.lists.slots,
            query_starts=self.lists.query_starts,
            sequence_lengths=self.lists.sequence_lengths,
            page_table=self.lists.page_table,
            num_tokens=self.num_tokens,
            page_size=page_size,
            device=self.slots.device,
        )

    @cached_property
    def row_spans(self) -> tuple[RowSpan, ...]:
        """The rows of each sequence on the host, for bodies that keep no pages: once a step."""
        starts, lengths = self.lists.query_starts, self.lists.sequence_lengths
        slots = range(len(lengths)) if self.state_slots is None else self.state_slots.tolist()
        return tuple(
            RowSpan(starts[b], starts[b + 1], lengths[b] - (starts[b + 1] - starts[b]), slots[b])
            for b in range(len(lengths))
        )

    def state(self, op: str, site: str) -> Any:
        """Return what the step holds for one site, or say which sites it does hold."""
        try:
            return self.sites[site]
        except KeyError:
            known = ", ".join(f"`{name}`" for name in list(self.sites)[:8]) or "none"
            raise StepError(
                f"`{op}` ran at site `{site}`, for which this step holds no state",
                hint=f"give `Step(sites=...)` an entry for `{site}`; it has {known}",
                facts={"op": op, "site": site, "sites": list(self.sites)},
            ) from None

    def cache(self, op: str, site: str) -> PagedCache:
        """Return the paged cache of one site."""
        state = self.state(op, site)
        if isinstance(state, PagedCache):
            return state
        if isinstance(state, Tensor) and state.dim() == 5 and state.shape[0] == 2:
            return PagedCache(state)
        raise StepError(
            f"`{op}` ran at site `{site}`, whose state is a `{type(state).__name__}` and no paged cache",
            hint="put a `PagedCache`, or a tensor of shape [2, P, S, K, D], under the site's name",
            facts={"op": op, "site": site, "state": type(state).__name__},
        )


def _as_tensors(lists: StepLists, states: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Put a step's numbers on the device: in one copy, since each waits for its turn there.

    Tensors:
        ->  [T], [B+1], [B], [B, M], [B]  i32
    """
    width = max(map(len, lists.page_table), default=0)
    numbers, blank = array("i"), array("i", [0]) * width
    parts = (lists.slots, lists.query_starts, lists.sequence_lengths, states)
    for part in parts:
        numbers.extend(part)
    for own in lists.page_table:
        numbers.extend(own)
        numbers.extend(blank[len(own) :])
    whole = on_device(numbers, device)
    slots, starts, lengths, state, table = whole.split(
        [*(len(part) for part in parts), len(lists.page_table) * width]
    )
    return slots, starts, lengths, table.view(len(lists.page_table), width), state


_CURRENT: ContextVar[Step | None] = ContextVar("piecework_step", default=None)


@contextmanager
def step_context(step: Step) -> Iterator[Step]:
    """Make `step` the one that opaque bodies see, until the block ends; blocks nest."""
    token = _CURRENT.set(step)
    try:
        yield step
    finally:
        _CURRENT.reset(token)


def running_step() -> Step | None:
    """Return the step that is running; None outside of any."""
    return _CURRENT.get()


def current_step(op: str, site: str) -> Step:
    """Return the step that is running, or raise an error that names the operator and the site that asked."""
    step = _CURRENT.get()
    if step is None:
        raise StepError(
            f"`{op}` was called at site `{site}` outside a step",
            hint="call the model or program under `with step_context(step):`; each thread needs its own",
            facts={"op": op, "site": site},
        )
    return step


@contextmanager
def opaque_body(op: str, site: str) -> Iterator[Step]:
    """Run a user's opaque body between the step's hooks: `with opaque_body("my::op", site) as step: ...`."""
    step = current_step(op, site)
    for hook in step.before:
        hook(op, site)
    yield step
    for hook in step.after:
        hook(op, site)
