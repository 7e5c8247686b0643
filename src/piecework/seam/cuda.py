"""A CUDA device that records graphs: one pool, one stream of its own, no garbage collection while it records."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from piecework.errors import CaptureError
from piecework.seam.dispatch import Around, Watching
from piecework.values.device import Graph

_broken: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording failed. Torch's allocators keep a filter that refers to a graph until its recording ends in
good order, so these few bytes stay."""


class CudaDevice:
    """One GPU; `index` is the current one where it is not given.

    All graphs share one pool and are recorded on one stream. Only what this thread does may break a recording
    (`thread_local`): other threads go on using the GPU.
    """

    name = "cuda"

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise CaptureError("there is no CUDA device to capture on", hint="leave capture out, or use `none`")
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._stream = torch.cuda.Stream(self._device)
        self._pool = _Pool(self._device.index)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pool_bytes = 0
        self._driver_bytes = 0

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Work on the recording stream with garbage collection off; the caller's stream waits for it afterwards."""
        with collector_off(), torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                current.wait_stream(self._stream)
                forget_workspaces()  # the recording stream's, which trials have used, would stay for good

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Count what the block adds to the pool and to the driver's own memory."""
        reserved, free = self._bytes("reserved_bytes", "current"), torch.cuda.mem_get_info(self._device)[0]
        try:
            yield
        finally:
            grown = self._bytes("reserved_bytes", "current") - reserved
            taken = free - torch.cuda.mem_get_info(self._device)[0]
            self._pool_bytes += max(0, grown)
            self._driver_bytes += max(0, taken - max(0, grown))

    def begin(self) -> None:
        """Start to record a graph on the current stream."""
        forget_workspaces()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> Graph | None:
        """Stop recording and return the graph, ready to run; None where it holds no work."""
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph is being recorded"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                graph.capture_end()
            except Exception:
                self._graph = graph
                raise
        is_empty = False
        for warning in said:
            if "graph is empty" in str(warning.message).lower():
                is_empty = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        forget_workspaces()
        return None if is_empty else graph

    def abort(self) -> None:
        """End a recording that failed, whatever state it is in, and clear the error that it left."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self._end_broken(graph)
        # A stream that was invalidated reports the old error once more at the next call; that call is made here.
        for attempt in (torch.cuda.synchronize, torch.cuda.synchronize):
            with contextlib.suppress(Exception):
                attempt(self._device)
        with contextlib.suppress(Exception), torch.cuda.stream(self._stream):
            self._free_generator()

    def _end_broken(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph.capture_end()
        except RuntimeError:
            _broken.append(graph)
            # `capture_end` raises before it has told the allocators. The GPU's would go on serving this thread from
            # the pool, and count one graph more that uses it; that of pinned memory cannot be told at all, and takes
            # no second recording to a pool that it believes is recorded to. So the graphs to come get another pool.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool.handle)
                torch._C._cuda_releasePool(self._device.index, self._pool.handle)
            self._renew_pool()
        with contextlib.suppress(Exception):
            graph.reset()

    def _free_generator(self) -> None:
        """Let the GPU's generator draw again: some releases leave it in the recording that failed, for good.

        It gets a copy of its state, which is in no recording. (An empty recording that ends in good order would take
        it out as well, but on torch 2.11 begins one that the allocator never hears the end of.) Random numbers of
        graphs recorded before go on from the old state.
        """
        generator = torch.cuda.default_generators[self._device.index]
        if not _can_draw(generator):
            generator.graphsafe_set_state(generator.clone_state())

    def run(self, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Call compiled code: the stream sees its kernels."""
        return call(*arguments)

    def watch(self, around: Around) -> contextlib.AbstractContextManager[Any]:
        return Watching(around)

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not keep it."""
        if not tensor.is_cuda:
            return tensor
        storage = tensor.untyped_storage()
        owned = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        layout = {
            "data_ptr": storage.data_ptr(),
            "nbytes": storage.nbytes(),
            "device": tensor.device,
            "size": tuple(tensor.shape),
            "stride": tuple(tensor.stride()),
            "storage_offset": tensor.storage_offset(),
            "dtype": tensor.dtype,
        }
        alias: Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(layout, owned)
        return alias

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def copy_together(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy all in one launch where dtypes allow it."""
        if len(targets) == 1:
            targets[0].copy_(sources[0], non_blocking=True)
        elif targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def before_step(self) -> None:
        return None

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def collect(self) -> None:
        """Collect garbage and give cached memory back to the driver."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def pool_bytes(self) -> int:
        return self._pool_bytes

    def used_bytes(self) -> int:
        return self._pool_bytes + self._driver_bytes

    @contextlib.contextmanager
    def measure_peak(self) -> Iterator[Callable[[], int]]:
        """Measure the most memory that the block allocated at a time. Torch's own peak statistics start anew here."""
        forget_workspaces()  # what a recording takes for one is part of what it needs
        base = self._bytes("allocated_bytes", "current")
        torch.cuda.reset_peak_memory_stats(self._device)
        yield lambda: self._bytes("allocated_bytes", "peak") - base

    def _bytes(self, what: str, when: str) -> int:
        """Read one number of the allocator's; to ask for one by name torch would write out all of them."""
        found: int = torch.cuda.memory.memory_stats_as_nested_dict(self._device)[what]["all"][when]
        return found

    def release(self) -> None:
        """Begin a new pool; the old one's memory goes with its last graph."""
        self._renew_pool()
        self._pool_bytes = self._driver_bytes = 0

    def _renew_pool(self) -> None:
        self._pool.let_go()
        self._pool = _Pool(self._device.index)


class _Pool:
    """A graph pool that stays while this object does, even when a failed recording leaves no graph in it.

    Torch counts the graphs of a pool, and refuses a pool whose count has come down to zero.
    """

    def __init__(self, index: int) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self.handle)
        torch._C._cuda_endAllocateToPool(index, self.handle)
        self.let_go = weakref.finalize(self, torch._C._cuda_releasePool, index, self.handle)
        self.let_go.atexit = False


def forget_workspaces() -> None:
    """Drop the workspaces that cuBLAS keeps for each stream.

    Called on both sides of a recording, so that a graph's workspace is allocated in the graph's own pool and in no
    other place: one allocated before would be given back to the driver by whoever drops it later (torch's own graphs
    do), and the graph would go on writing there.
    """
    torch._C._cuda_clearCublasWorkspaces()


def _can_draw(generator: torch.Generator) -> bool:
    """Tell whether a generator can draw numbers; its state is afterwards what it was."""
    state = generator.get_state()
    try:
        torch.empty(4, device=generator.device).normal_(generator=generator)
    except RuntimeError:
        return False
    generator.set_state(state)
    return True


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running inside the block: what it frees there would break a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
