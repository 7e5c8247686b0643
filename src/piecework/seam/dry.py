"""A device that records and replays graphs on the CPU, and is as unforgiving as a real one.

A graph is a tape of operator calls on addresses. What is allocated while a graph is recorded lies in a pool of fixed
memory, which is used again once it is free, by this size and by others. Replay runs the tape over the same addresses:
no Python of the model runs, no decision is taken anew, memory that moved is read where it was. Before each step the
whole pool is filled with NaN, so what a graph reads without anyone having written it in this step is no number.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from piecework.errors import CaptureError
from piecework.seam.cuda import collector_off
from piecework.seam.dispatch import Around, Watching
from piecework.seam.dry_pool import ALIGNMENT, DryPool, alias_of
from piecework.values.declaration import registry
from piecework.values.tree import leaves, map_leaves

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_HOST_READS = {"_local_scalar_dense", "is_nonzero", "equal"}
_HOST_METHODS = {"tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "__array__"}


@dataclass(frozen=True, eq=False)
class Entry:
    """One call on the tape: arguments at their addresses, and where fresh results go."""

    name: str
    call: Callable[..., Any]
    args: Any
    kwargs: Any
    homes: tuple[Tensor | None, ...]


class DryGraph:
    """A tape; `outside` are the memories beyond the pool that it reads, kept so that reading a freed one is seen."""

    def __init__(self, entries: Sequence[Entry], outside: dict[int, tuple[str, Any]]) -> None:
        self._entries = list(entries)
        self._outside = outside

    def replay(self) -> None:
        """Run the tape; raise where a real graph would have read memory that its owner has freed."""
        for name, storage in self._outside.values():
            if torch._C._storage_Use_Count(storage._cdata) <= 1:  # none but the tape holds it
                raise CaptureError(f"`{name}` reads memory that was freed after the capture")
        for entry in self._entries:
            found = entry.call(*entry.args, **entry.kwargs)
            results = [leaf for _, leaf in leaves(found, "result") if isinstance(leaf, Tensor)]
            for home, result in zip(entry.homes, results, strict=True):
                if home is not None:
                    home.copy_(result)

    def reset(self) -> None:
        self._entries.clear()
        self._outside.clear()


class DryDevice:
    """A CPU that behaves like a device with graphs.

    With `by_call`, compiled pieces are put on the tape as whole calls: kernels that go round the dispatcher are not
    seen otherwise. `keeps_outside` holds what graphs read beyond the pool, to tell that its owner has freed it.
    """

    name = "dry"

    def __init__(self, pool_bytes: int = 1 << 26, *, by_call: bool = False) -> None:
        self.pool = DryPool(pool_bytes)
        self.collections = 0
        self.replays = 0
        self._pool_bytes = pool_bytes
        self._by_call = by_call
        self._tape: list[Entry] | None = None
        self._outside: dict[int, tuple[str, Any]] = {}

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        with collector_off(), _HostReads(self), Watching(self._around):
            yield

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        if self._tape is not None:
            raise RuntimeError("a graph is being recorded already")
        self._tape, self._outside = [], {}

    def end(self) -> DryGraph | None:
        assert self._tape is not None, "no graph is being recorded"
        tape, self._tape = self._tape, None
        return DryGraph(tape, self._outside) if tape else None

    def abort(self) -> None:
        self._tape = None

    def run(self, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Call compiled code, as operators or as one entry of the tape."""
        if not self._by_call or self._tape is None:
            return call(*arguments)
        tape = self._tape
        with self._paused():
            return self._record("a compiled piece", call, tuple(arguments), {}, call(*arguments), tape)

    def watch(self, around: Around) -> contextlib.AbstractContextManager[Any]:
        return Watching(around)

    def alias(self, tensor: Tensor) -> Tensor:
        with self._paused():
            return alias_of(tensor)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Do the block's work now, without putting it on the tape."""
        tape, self._tape = self._tape, None
        try:
            yield
        finally:
            self._tape = tape

    def is_capturing(self) -> bool:
        return self._tape is not None

    def copy_together(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def before_step(self) -> None:
        self.replays += 1
        self.pool.poison()

    def synchronize(self) -> None:
        return None

    def collect(self) -> None:
        self.collections += 1
        gc.collect()

    def pool_bytes(self) -> int:
        return self.pool.high_water

    def used_bytes(self) -> int:
        return self.pool.high_water

    @contextlib.contextmanager
    def measure_peak(self) -> Iterator[Callable[[], int]]:
        """Sum what operators allocate inside the block, less what is freed again, at its highest."""
        live = {"now": 0, "peak": 0}

        def count(name: str, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found = operator(*args, **kwargs)
            known = {t.untyped_storage().data_ptr() for _, t in leaves([args, kwargs], "a") if isinstance(t, Tensor)}
            for _, leaf in leaves(found, "r"):
                if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                    size = -(-leaf.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
                    live["now"] += size
                    live["peak"] = max(live["peak"], live["now"])
                    weakref.finalize(leaf, _subtract, live, size)
            return found

        with Watching(count):
            yield lambda: live["peak"]

    def release(self) -> None:
        self.pool = DryPool(self._pool_bytes)

    # ---------------------------------------------------------------------------------------------------- tape

    def _around(self, name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._tape is None:
            return operator(*args, **kwargs)
        short = name.rpartition("::")[2].partition(".")[0]
        declared = registry.get(name.partition(".")[0])
        if declared is not None and declared.body is not None:
            with Watching(self._around):  # its own operators go on the tape; what Python decides in it is frozen
                return declared.body(*args, **kwargs)
        self._refuse(name, short, operator, args)
        if operator._schema.is_mutable:
            return self._write(name, operator, args, kwargs, self._tape)
        found = operator(*args, **kwargs)
        if short in _ALLOCATIONS:
            return self._rehome(found)[0]
        return self._record(name, operator, args, kwargs, found, self._tape)

    def _refuse(self, name: str, short: str, operator: Any, args: tuple[Any, ...]) -> None:
        dynamic = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags))
        if short.startswith(("index", "_unsafe_index")):
            # Only a mask has as many results as it has ones.
            masks = [leaf for _, leaf in leaves(list(args[1:]), "a") if isinstance(leaf, Tensor)]
            dynamic = any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)
        if short in _HOST_READS or dynamic:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")

    def _write(self, name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tape: list[Entry]) -> Any:
        """Put an operator that writes to its arguments on the tape without doing it: recording does no work."""
        copies: dict[int, Tensor] = {}

        def copy(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            twin = leaf.clone(memory_format=torch.preserve_format)
            copies[id(twin)] = leaf
            return twin

        found = operator(*map_leaves(copy, list(args), "args"), **map_leaves(copy, dict(kwargs), "kwargs"))
        own = map_leaves(lambda _, leaf: copies.get(id(leaf), leaf), found, "result")
        return self._record(name, operator, args, kwargs, own, tape)

    def _record(
        self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, found: Any, tape: list[Entry]
    ) -> Any:
        """Put a call on the tape; fresh results move to the pool, views and written arguments stay what they are."""
        given = {id(leaf): leaf for _, leaf in leaves([args, kwargs], "a") if isinstance(leaf, Tensor)}
        known = {leaf.untyped_storage().data_ptr() for leaf in given.values() if leaf.numel()}
        result, homes = self._rehome(found, known)
        is_view = name.startswith("aten::") and not _is_mutable(call) and not any(home is not None for home in homes)
        if not is_view:
            for leaf in given.values():
                self._note_outside(name, leaf)
            entry_args = map_leaves(
                lambda _, leaf: alias_of(leaf) if isinstance(leaf, Tensor) else leaf, list(args), "args"
            )
            entry_kwargs = map_leaves(
                lambda _, leaf: alias_of(leaf) if isinstance(leaf, Tensor) else leaf, dict(kwargs), "kwargs"
            )
            weak = tuple(alias_of(home) if home is not None else None for home in homes)
            tape.append(Entry(name, call, entry_args, entry_kwargs, weak))
        return result

    def _rehome(self, found: Any, known: set[int] | None = None) -> tuple[Any, list[Tensor | None]]:
        homes: list[Tensor | None] = []

        def move(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.numel() == 0 or leaf.untyped_storage().data_ptr() in (known or ()):
                homes.append(None)
                return leaf
            home = self.pool.allocate(leaf.shape, leaf.stride(), leaf.dtype)
            # Recording goes on by what operators give, for they may be indices; replay starts from poison all the same.
            home.copy_(leaf)
            homes.append(home)
            return home

        return map_leaves(move, found, "result"), homes

    def _note_outside(self, name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.numel() and not self.pool.holds(storage.data_ptr()):
            self._outside.setdefault(storage.data_ptr(), (name, storage))


class _HostReads(TorchFunctionMode):
    """Refuse what reads a tensor on the host while a graph is recorded: some of it never reaches the dispatcher."""

    def __init__(self, device: DryDevice) -> None:
        super().__init__()
        self._device = device

    @property
    def is_recording(self) -> bool:
        """Say so to those who would read a value."""
        return self._device.is_capturing()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_recording and getattr(func, "__name__", "") in _HOST_METHODS:
            raise RuntimeError(f"operation not permitted when stream is capturing: Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _is_mutable(call: Any) -> bool:
    schema = getattr(call, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _subtract(live: dict[str, int], size: int) -> None:
    live["now"] -= size
