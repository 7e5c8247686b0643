"""What capture and replay ask of a device that records graphs; a CUDA device and a dry one answer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor


class Graph(Protocol):
    """Recorded work: `replay` does it again on the addresses that it was recorded with."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Device(Protocol):
    """A device with one memory pool for all graphs that it records.

    Memory allocated while a graph is recorded comes from the pool, and what is freed there serves later graphs.
    Graphs that share the pool may be replayed in any order, but one after another, and nothing that lies in the pool
    may be read once a graph that does not belong to the same size has been replayed.
    """

    name: str

    def session(self) -> AbstractContextManager[None]:
        """Prepare for recording some graphs: a stream of its own, no garbage collection; put back afterwards."""
        ...

    def holding(self) -> AbstractContextManager[None]:
        """Count what is recorded inside the block as the graphs' memory."""
        ...

    def begin(self) -> None:
        """Start to record a graph; work is noted and not done until `end`."""
        ...

    def end(self) -> Graph | None:
        """Stop recording and return the graph; None where nothing but allocation took place."""
        ...

    def abort(self) -> None:
        """Stop recording after a failure and leave the device usable; never raises."""
        ...

    def run(self, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Call compiled code; a device that does not see its kernels records the call itself."""
        ...

    def watch(
        self, around: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    ) -> AbstractContextManager[None]:
        """Hand every operator call to `around(name, operator, args, kwargs)`, which makes it or not."""
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """Return the same memory as a tensor that does not own it."""
        ...

    def is_capturing(self) -> bool:
        """Tell whether a graph is being recorded on the current stream, by whomever."""
        ...

    def copy_together(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy each source to its target, in as few launches as may be."""
        ...

    def before_step(self) -> None:
        """Prepare for a replay; only a dry device does something here."""
        ...

    def synchronize(self) -> None: ...

    def collect(self) -> None:
        """Collect garbage and give cached memory back."""
        ...

    def pool_bytes(self) -> int:
        """Return the bytes of the graphs' pool."""
        ...

    def used_bytes(self) -> int:
        """Return the bytes that graphs hold by now: their pool, and what the driver keeps for them."""
        ...

    def measure_peak(self) -> AbstractContextManager[Callable[[], int]]:
        """Measure the most bytes that work inside the block held at a time, beyond what it found."""
        ...

    def release(self) -> None:
        """Forget the pool; its memory is given back once no graph and no tensor holds it."""
        ...
