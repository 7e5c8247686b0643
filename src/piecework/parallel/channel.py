"""From rank 0 to the others: messages in one order, each received by all; and what a rank posts for rank 0 to find.

Messages go over gloo on the CPU, in a group of their own, whatever the graph's collectives run on. Whoever waits for
one sleeps. What goes the other way is rare: it stands in the launcher's store, where rank 0 looks without waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piecework.errors import ParallelError
from piecework.parallel.ranks import Ranks, telling_of_loss
from piecework.seam.groups import post, posted
from piecework.values.placement import Placement

FIRST_BYTES = 4096
"""What one broadcast carries: the kind and the length of a message, and a short one whole. The rest takes a second."""
_HEAD_BYTES = 12


@dataclass(frozen=True)
class Channel:
    """One way from rank 0 to all others. A rank that hears nothing for `timeout_s` takes rank 0 for gone."""

    name: str
    placement: Placement
    group: Any
    timeout_s: float
    lock: Any = field(default_factory=threading.Lock)

    @property
    def others(self) -> range:
        return range(1, self.placement.ranks)

    def send(self, kind: int, body: bytes | bytearray = b"") -> None:
        """Tell all other ranks; raise ParallelError where one is gone. Any thread of rank 0 may send."""
        head = kind.to_bytes(4, "little") + len(body).to_bytes(8, "little")
        first = bytearray(head + body[: FIRST_BYTES - _HEAD_BYTES])
        first += bytes(FIRST_BYTES - len(first))
        rest = bytearray(body[FIRST_BYTES - _HEAD_BYTES :])
        with self.lock, telling_of_loss(self.placement):
            self._broadcast(torch.frombuffer(first, dtype=torch.uint8), self.timeout_s)
            if rest:
                self._broadcast(torch.frombuffer(rest, dtype=torch.uint8), self.timeout_s)

    def receive(self, timeout_s: float = 0.0) -> tuple[int, bytes]:
        """Wait for the next message; return its kind and its body. Raises ParallelError where rank 0 is gone."""
        wait_s = timeout_s or self.timeout_s
        first = bytearray(FIRST_BYTES)
        with telling_of_loss(self.placement):
            self._broadcast(torch.frombuffer(first, dtype=torch.uint8), wait_s)
            length = int.from_bytes(first[4:_HEAD_BYTES], "little")
            body = bytes(first[_HEAD_BYTES : _HEAD_BYTES + length])
            if length > len(body):
                rest = bytearray(length - len(body))
                self._broadcast(torch.frombuffer(rest, dtype=torch.uint8), wait_s)
                body += bytes(rest)
        return int.from_bytes(first[:4], "little"), body

    def post(self, name: str, text: str = "") -> None:
        """Leave a word of this rank where rank 0 looks for it."""
        with telling_of_loss(self.placement):
            post(f"{self.name}/{name}/{self.placement.rank}", text)

    def posted(self, name: str, rank: int) -> str | None:
        """Return what a rank has posted under a name, None where it has not; nobody is waited for."""
        with telling_of_loss(self.placement):
            return posted(f"{self.name}/{name}/{rank}")

    def have_posted(self, name: str, ranks: Iterable[int]) -> bool:
        """Tell whether all of some ranks have posted under a name."""
        return all(self.posted(name, rank) is not None for rank in ranks)

    def meet(self, timeout_s: float) -> None:
        """Wait until all ranks have come here. Raises ParallelError where one does not come."""
        with telling_of_loss(self.placement):
            dist.barrier(group=self.group, async_op=True).wait(timedelta(seconds=timeout_s))

    def _broadcast(self, tensor: torch.Tensor, timeout_s: float) -> None:
        """Give rank 0's bytes to all.

        Tensors:
            tensor  [N]  u8  MUTATED on all other ranks
        """
        work: Any = dist.broadcast(tensor, group=self.group, group_src=0, async_op=True)
        if not work.wait(timedelta(seconds=timeout_s)):
            raise ParallelError(
                f"rank {self.placement.rank} of {self.placement.ranks} waited {timeout_s:g} seconds in vain",
                hint="see what the other ranks do",
            )


def open_channel(ranks: Ranks, timeout_s: float) -> Channel:
    """Open a way from rank 0 to the others; all ranks call this at the same place."""
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Channel(f"piecework/{group.group_name}", ranks.placement, group, timeout_s)
