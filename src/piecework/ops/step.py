"""What an opaque body needs of the step it runs in: slots, lengths, pages, and the cache of its site.

The values of a step are no arguments of the graph: nothing in them is traced, guarded or keyed. A body asks for them
by its own name and its site's. They stand in a `ContextVar`, so two threads, and two programs inside one another,
never see each other's.
"""

from __future__ import annotations

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
from piecework.ops.layout import Layout, lay_out
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
class Step:
    """One pass over flat tokens: which rows belong to which sequence, and where their keys and values live.

    Tensors:
        slots             [T]     i32  page * S + offset of each row's token; -1 marks padding
        query_starts      [B+1]   i32  rows query_starts[b] to query_starts[b+1] belong to sequence b
        sequence_lengths  [B]     i32  tokens of each sequence once this step is done
        page_table        [B, M]  i32  the pages of each sequence, in order; unused places hold anything
        state_slots       [B]     i32  where each sequence's recurrent state lies; None: sequence b has slot b

    `num_tokens` is the true count of rows: rows from there on are padding. `sites` holds what each site's body works
    on: a `PagedCache` (or its bare tensor) for our own operators, any object for a user's.
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
        state_slots: Sequence[int] | None = None,
    ) -> Step:
        """Make a step from host integers, padding the slots to `num_padded` rows."""
        padding = [-1] * max(0, num_padded - len(slots))
        width = max((len(pages) for pages in page_table), default=0)
        table = [[*pages, *[0] * (width - len(pages))] for pages in page_table]

        def as_tensor(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            slots=as_tensor([*slots, *padding]),
            query_starts=as_tensor(query_starts),
            sequence_lengths=as_tensor(sequence_lengths),
            page_table=as_tensor(table).reshape(len(page_table), width),
            num_tokens=len(slots),
            sites=sites,
            before=before,
            after=after,
            state_slots=None if state_slots is None else as_tensor(state_slots),
        )

    @cached_property
    def _layouts(self) -> dict[int, Layout]:
        return {}

    def layout(self, page_size: int) -> Layout:
        """Plan reads and writes on the host for pages of one size: once a step, whatever the number of layers."""
        found = self._layouts.get(page_size)
        if found is None:
            found = lay_out(
                slots=self.slots.tolist(),
                query_starts=self.query_starts.tolist(),
                sequence_lengths=self.sequence_lengths.tolist(),
                page_table=self.page_table.tolist(),
                num_tokens=self.num_tokens,
                page_size=page_size,
                device=self.slots.device,
            )
            self._layouts[page_size] = found
        return found

    @cached_property
    def row_spans(self) -> tuple[RowSpan, ...]:
        """The rows of each sequence on the host, for bodies that keep no pages: once a step."""
        starts, lengths = self.query_starts.tolist(), self.sequence_lengths.tolist()
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
