"""What a source writes beside its results: found before the first capture, and put back after every run of a trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from piecework.stages.capture.sources import Source

_ON_DEVICE_BYTES = 1 << 28  # more than this is kept in the host's memory meanwhile


class State:
    """Tensors that forward writes in place: weights, buffers, inputs at fixed addresses."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._tensors: dict[tuple[object, ...], Tensor] = {}
        self._before: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            self._tensors[_place(tensor)] = tensor

    def save(self, tensor: Tensor) -> None:
        """Keep a tensor as it is now, before its first write.

        Tensors:
            tensor  [...]  any  a view of what is written, or all of it
        """
        if _place(tensor) not in self._tensors:
            self._tensors[_place(tensor)] = tensor
            self._before.append((tensor, tensor.clone()))

    def undo(self) -> None:
        """Put back what was saved, last first: views of one memory were saved one after another."""
        for tensor, saved in reversed(self._before):
            tensor.copy_(saved)
        self._before.clear()

    def copies(self) -> list[Tensor]:
        """Return copies of all tensors as they are.

        Tensors:
            ->  [...]  any  one for each, in an order that stays
        """
        is_small = sum(t.numel() * t.element_size() for t in self._tensors.values()) <= _ON_DEVICE_BYTES
        return [t.clone() if is_small else t.to("cpu", copy=True) for t in self._tensors.values()]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """Give every tensor what it held when the copies were made.

        Tensors:
            copies  [...]  any  what `copies` returned
        """
        for tensor, saved in zip(self._tensors.values(), copies, strict=True):
            tensor.copy_(saved)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let the block write, and put everything back when it ends."""
        copies = self.copies()
        try:
            yield
        finally:
            self.put_back(copies)


def declared_state(source: Source, fixed: Mapping[str, Tensor]) -> State:
    """Return what a traced source is known to write; of another one it is learned in a run."""
    held = [one.tensor for one in source.checked.rivals if one.is_written]
    return State([*held, *(fixed[leaf.name] for leaf in source.leaves if leaf.is_written and leaf.name in fixed)])


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
