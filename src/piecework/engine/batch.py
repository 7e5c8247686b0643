"""A step's sequences as the flat tensors that a model takes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from piecework.engine.scheduler import Scheduled
from piecework.models.folder import MIN_ROWS
from piecework.ops import AttentionBackend, PagedCache, Step
from piecework.ops.numbers import on_device
from piecework.values.ladder import ladder

SIZES = (2, 4, 6, 8, 12, 16, 24, 32)
"""Small steps are padded to one of these: a program keeps memory made for as many sizes, and makes it anew for others.

The least is 2, since size 1 would need artifacts of its own.
"""


def padded_size(count: int, sizes: Sequence[int]) -> int:
    """Return the rows of a step of `count` tokens, padding included."""
    return next((size for size in sizes if count <= size), count)


def captured_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes up to `most` that are captured; the least is that of the shortest step."""
    return tuple(rung.size for rung in ladder(most) if rung.size >= MIN_ROWS) or (MIN_ROWS,)


def padded_sizes(most_tokens: int, most_sequences: int, backend: AttentionBackend) -> tuple[int, ...]:
    """Return the sizes that an engine pads to: those that are captured, where decode steps are recorded whole."""
    if backend.capturable:
        return captured_sizes(most_sequences)
    return tuple(size for size in SIZES if size <= most_tokens)


@dataclass(frozen=True)
class Batch:
    """What a model is called with for one step, and which sequences it is of.

    `is_decode` says that each sequence brings one token; `size` counts the rows, padding included.

    Tensors:
        input_ids     [1, T]  i64
        position_ids  [1, T]  i64
        rows          [N]     i64  the last rows of the sequences whose next token is chosen, and repeats of the first
    """

    scheduled: tuple[Scheduled, ...]
    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    step: Step
    num_tokens: int
    is_decode: bool

    @cached_property
    def sampled(self) -> tuple[Scheduled, ...]:
        return tuple(each for each in self.scheduled if each.is_sampled)

    @property
    def size(self) -> int:
        return self.input_ids.shape[1]


def _flatten(scheduled: Sequence[Scheduled], page_size: int) -> tuple[list[int], ...]:
    """Return a step's token ids, positions and slots, where sequences start, and which rows are chosen from.

    Last come the places whose tokens are pending, and where among the coming ones each of these is.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, rows, targets, sources = [0], [], [], []
    for each in scheduled:
        sequence, start, end = each.sequence, each.start, each.end
        ids += sequence.token_ids[start:end]
        if end > len(sequence.token_ids):
            targets.append(len(ids))
            sources.append(sequence.pending)
            ids.append(0)
        positions += range(start, end)
        pages = sequence.pages
        slots += [pages[at // page_size] * page_size + at % page_size for at in range(start, end)]
        starts.append(len(ids))
        if each.is_sampled:
            rows.append(len(ids) - 1)
    return ids, positions, slots, starts, rows, targets, sources


def make_batch(
    scheduled: Sequence[Scheduled],
    caches: Mapping[str, PagedCache],
    page_size: int,
    device: str | torch.device,
    backend: AttentionBackend | None = None,
    sizes: Sequence[int] = SIZES,
    coming: Tensor | None = None,
) -> Batch:
    """Lay the tokens of a step in a row, those of each sequence together, and pad to one of `sizes`.

    For a backend whose decode steps are recorded whole, padding rows are sequences too, of no tokens. Tokens that are
    pending are `coming`: they go to their places on the device.

    Tensors:
        coming  [N]  i64  what the step before chose
    """
    ids, positions, slots, starts, rows, targets, sources = _flatten(scheduled, page_size)
    is_decode = all(each.num_tokens == 1 for each in scheduled)
    size = padded_size(len(ids), sizes)
    padding = [0] * (size - len(ids))
    empty = padding if is_decode and backend is not None and backend.capturable else []
    step = Step.from_lists(
        slots=slots,
        query_starts=[*starts, *[len(ids)] * len(empty)],
        sequence_lengths=[*(each.end for each in scheduled), *empty],
        page_table=[*(each.sequence.pages for each in scheduled), *[()] * len(empty)],
        sites=caches,
        num_padded=size,
        device=device,
        backend=backend,
    )
    rows += [rows[0] if rows else 0] * ((size if is_decode else MIN_ROWS) - len(rows))
    parts = (ids, padding, positions, padding, rows, targets, sources)
    whole = on_device(array("q", [number for part in parts for number in part]), device)  # one copy for all
    input_ids, position_ids, kept, places, origins = whole.split(
        [size, size, len(rows), len(targets), len(sources)]
    )
    if targets:
        assert coming is not None, "a token is pending because a step chose it"
        input_ids.index_copy_(0, places, coming.index_select(0, origins))
    return Batch(
        scheduled=tuple(scheduled),
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        rows=kept,
        step=step,
        num_tokens=len(ids),
        is_decode=is_decode,
    )


def empty_step(
    caches: Mapping[str, PagedCache],
    size: int,
    device: str | torch.device,
    backend: AttentionBackend | None = None,
    most_pages: int = 0,
) -> Step:
    """Return a step of padding alone: what graphs are recorded in, while nothing is written.

    With `most_pages` each row is a sequence that may come to have as many: the step of a graph that holds attention.
    """
    sequences = size if most_pages else 0
    return Step.from_lists(
        slots=(),
        query_starts=[0] * (sequences + 1),
        sequence_lengths=[0] * sequences,
        page_table=[[0] * most_pages] * sequences,
        sites=caches,
        num_padded=size,
        device=device,
        backend=backend,
    )
