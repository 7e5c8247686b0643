"""A step as bytes: what rank 0 sends so that another rank runs the same step on its own share of the cache."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecework.ops import AttentionBackend, Step

_HEAD = 5  # numbers that stand before all others


@dataclass(frozen=True)
class UnpackedStep:
    """A step that came from rank 0: which function runs it, and what that is called with.

    Tensors:
        input_ids     [1, T]  i64
        position_ids  [1, T]  i64
        rows          [N]     i64
    """

    function: int
    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    step: Step
    is_decode: bool


def pack_step(function: int, input_ids: Tensor, position_ids: Tensor, rows: Tensor, step: Step) -> bytes:
    """Return a step as bytes: whole numbers, one after another.

    Tensors:
        input_ids     [1, T]  i64
        position_ids  [1, T]  i64
        rows          [N]     i64
    """
    lists = step.lists
    numbers = torch.cat([input_ids.reshape(-1), position_ids.reshape(-1), rows.reshape(-1)]).tolist()  # one copy
    head = (function, input_ids.numel(), rows.numel(), len(lists.sequence_lengths), step.num_tokens)
    found = array("i", head)
    for part in (
        numbers, lists.slots[: step.num_tokens], lists.query_starts, lists.sequence_lengths,
        [len(pages) for pages in lists.page_table], *lists.page_table,
    ):  # fmt: skip
        found.extend(part)
    return found.tobytes()


def unpack_step(
    data: bytes, sites: Mapping[str, Any], device: str, backend: AttentionBackend | None = None
) -> UnpackedStep:
    """Return the step that `pack_step` wrote, over this rank's own sites."""
    numbers = array("i")
    numbers.frombytes(data)
    function, size, num_rows, sequences, num_tokens = numbers[:_HEAD]
    at = _HEAD

    def take(count: int) -> array[int]:
        nonlocal at
        at += count
        return numbers[at - count : at]

    whole = torch.tensor(take(2 * size + num_rows), dtype=torch.int64).to(device)
    input_ids, position_ids, rows = whole.split([size, size, num_rows])
    slots, starts, lengths = take(num_tokens), take(sequences + 1), take(sequences)
    pages = [take(count) for count in take(sequences)]
    step = Step.from_lists(
        slots=slots,
        query_starts=starts,
        sequence_lengths=lengths,
        page_table=pages,
        sites=sites,
        num_padded=size,
        device=device,
        backend=backend,
    )
    is_decode = all(end - start <= 1 for start, end in zip(starts, starts[1:], strict=False))
    return UnpackedStep(function, input_ids[None], position_ids[None], rows, step, is_decode)
