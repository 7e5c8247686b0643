"""The ranks of a start: how a process joins them, tells the others a few bytes, and learns that one is gone.

What ranks say to one another is JSON over gloo, on the CPU, whatever the collectives of the graph run on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piecework.errors import OptionError, ParallelError
from piecework.seam.groups import claimed, gloo_group, register
from piecework.values.placement import Placement, group_name

TIMEOUT_S = 1800.0  # how long one rank may compile while the others wait for it
_GONE = ("closed by peer", "Connection reset", "timed out", "Timed out", "Broken pipe", "NCCL", "ProcessGroup", "gloo")


@dataclass(frozen=True)
class Ranks:
    """All ranks of a start, and which of them this is; `control` carries words, `work` what a graph computes."""

    placement: Placement
    control: Any
    work: Any

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def size(self) -> int:
        return self.placement.ranks

    @property
    def group(self) -> str:
        """The name that the graph's collectives ask for."""
        return group_name(self.size)

    def enter(self) -> None:
        """Let the graph's collectives run among these ranks."""
        register(self.group, self.work)

    def share(self, value: Any) -> list[Any]:
        """Tell the other ranks a value of plain data; return what each rank told, in their order."""
        data = json.dumps(value).encode()
        with telling_of_loss(self.placement):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)]), group=self.control)
            longest = max(int(each) for each in lengths)
            own = torch.zeros(longest, dtype=torch.uint8)
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            told = [torch.empty_like(own) for _ in lengths]
            dist.all_gather(told, own, group=self.control)
        return [json.loads(bytes(each[: int(n)].tolist())) for each, n in zip(told, lengths, strict=True)]

    def send(self, data: bytes, source: int) -> bytes:
        """Give every rank the bytes of one; the others' `data` is not looked at."""
        with telling_of_loss(self.placement):
            length = torch.tensor([len(data)])
            dist.broadcast(length, group=self.control, group_src=source)
            own = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == source and data:
                own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(own, group=self.control, group_src=source)
        return own.numpy().tobytes()

    def must_agree(self, value: Any, what: str) -> None:
        """Raise ParallelError where ranks that must have come to the same have not."""
        told = self.share(value)
        if other := next((rank for rank, each in enumerate(told) if each != told[0]), 0):
            raise ParallelError(
                f"{what} differ between rank 0 and rank {other}",
                hint="the ranks run other files, versions or hardware; compare `piecework doctor` on each",
                facts={"ranks": self.size, "told": told},
            )

    def claim(self, what: str) -> bool:
        """Tell whether this rank is the first to claim something, also where others are gone."""
        return claimed(what)

    def leave(self) -> None:
        """Say goodbye, so that the ranks end in peace."""
        register(self.group, None)
        with suppress(Exception):
            dist.destroy_process_group()


def join(ranks: int, device: str, variables: Mapping[str, str]) -> Ranks:
    """Join the other ranks of a start, as a launcher has laid them out in `variables`.

    A process group that exists is used. On a GPU each rank takes the device of its place on the host.
    """
    size = int(variables.get("WORLD_SIZE", "0") or 0) if not dist.is_initialized() else dist.get_world_size()
    if size != ranks:
        started = f"{size} processes were started" if size else "this process was started alone"
        raise OptionError(
            f"the model is shared by {ranks} ranks, and {started}",
            hint=f"start it by `torchrun --nproc-per-node={ranks} -m piecework … -tp {ranks}`",
            facts={"ranks": ranks, "world_size": size},
        )
    is_gpu = device.startswith("cuda")
    if is_gpu:
        torch.cuda.set_device(int(variables.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=TIMEOUT_S)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo", timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    placement = Placement(dist.get_rank(), size)
    return Ranks(placement, control, dist.group.WORLD if is_gpu else gloo_group(timeout))


@contextmanager
def telling_of_loss(placement: Placement) -> Iterator[None]:
    """Turn what torch raises where another rank is gone into an error that says so."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in _GONE):
            raise
        raise ParallelError(
            f"another rank has ended or answers no more: rank {placement.rank} of {placement.ranks} cannot go on alone",
            hint="the message of the rank that failed first says why; all ranks are started together again",
            facts={"rank": placement.rank, "ranks": placement.ranks, "reason": str(error).splitlines()[0][:300]},
        ) from error
