"""Process groups by name: what a collective in a graph finds when it runs, and what stands for it while one compiles.

A graph holds the group's name alone, so that its text is the same on all ranks. Names are looked up in torch's own
registry at each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_made = itertools.count()


def _c10d() -> Any:
    """Return torch's own half of `torch.distributed`, which a process alone never loads."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def registered(name: str) -> Any | None:
    """Return the process group of a name, or None where there is none."""
    c10d = _c10d()

    try:
        return c10d._resolve_process_group(name)
    except RuntimeError:
        return None


def register(name: str, group: Any) -> None:
    """Let collectives of a name run on a group, in the place of any that had the name; None takes the name away.

    The registry keeps no group alive: whoever registers one holds it.
    """
    c10d = _c10d()

    with suppress(RuntimeError):  # nobody had the name; one that is gone still has it
        c10d._unregister_process_group(name)
    if group is not None:
        c10d._register_process_group(name, group)


@contextmanager
def standing_in(name: str, ranks: int) -> Iterator[None]:
    """Let collectives of a name run in this process alone until the block ends: sums of one, copies for the others.

    A compiler tries what it made before it serves, on one rank, while the others wait. Any group that had the name has
    it again afterwards.
    """
    before, alone = registered(name), stand_in_group(ranks)
    register(name, alone)
    try:
        yield
    finally:
        register(name, before)


def gloo_group(timeout: timedelta) -> Any:
    """Make a group of all ranks that works over gloo by one thread; every rank makes its groups in the same order.

    By default two threads of a gloo group take turns, and both note the name of what they finished in one string that
    nothing guards. A name of more than 15 letters (`ALLREDUCE_COALESCED`: a sum of shares, a gathering) lies on the
    heap, and two threads that free it at once corrupt it. Seen in 2.13.
    """
    c10d = _c10d()

    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = c10d.PrefixStore(f"piecework/gloo/{next(_made)}", _launchers_store())
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_default_device()]
    options._threads, options._timeout = 1, timeout
    group: Any = c10d.ProcessGroup(store, rank, ranks)
    backend = c10d.ProcessGroupGloo(store, rank, ranks, options)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    return group


def stand_in_group(ranks: int) -> Any:
    """Make a group of so many ranks of which only this one exists: it sends nothing and waits for nobody."""
    c10d = _c10d()

    backend: Any = c10d.FakeProcessGroup
    alone = getattr(backend, "_create_internal", backend)(0, ranks)
    group: Any = c10d.ProcessGroup(0, ranks)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), c10d.ProcessGroup.BackendType.CUSTOM, alone)
    return group


def claimed(what: str) -> bool:
    """Tell whether this process is the first of its group to claim something: the launcher's own store decides.

    True where nobody can be asked.
    """
    with suppress(Exception):
        return bool(_launchers_store().add(f"piecework/{what}", 1) == 1)
    return True


def post(name: str, text: str) -> None:
    """Leave a text under a name in the launcher's own store."""
    _launchers_store().set(name, text)


def posted(name: str) -> str | None:
    """Return the text under a name in the launcher's own store, None where there is none: nobody is waited for."""
    store = _launchers_store()
    return store.get(name).decode() if store.check([name]) else None


def _launchers_store() -> Any:
    return dist.distributed_c10d._get_default_store()
