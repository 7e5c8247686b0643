"""What a captured program is put together from: its sizes, its results, and what it asks of whoever captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from piecework.errors import CaptureError
from piecework.events import Observer
from piecework.ops.step import Step
from piecework.runtime.buffers import StaticInputs, StaticStep
from piecework.runtime.owners import AddressTable, Place
from piecework.runtime.segments import Output, Segment
from piecework.values.device import Device, Graph
from piecework.values.phases import CapturePlan, PhaseCapture

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class CapturedSize:
    """One padded size of one phase: its segments in order, and where its result lies."""

    phase: str
    form: str
    size: int
    segments: tuple[Segment, ...]
    graphs: tuple[Graph, ...]
    outputs: tuple[Output, ...]
    build: Callable[..., Any]
    step: StaticStep | None
    predicted_bytes: int
    size_bytes: int


class Replaying(Protocol):
    """What counts its steps: `generation` is another number after each."""

    generation: int


class Borrowed(Generic[Value]):
    """A result that lies in the graphs' own memory: it is valid until the next step, and says so afterwards."""

    __slots__ = ("_generation", "_program", "_value")

    def __init__(self, value: Value, program: Replaying) -> None:
        self._value = value
        self._program = program
        self._generation = program.generation

    @property
    def value(self) -> Value:
        """The result; raises CaptureError once a later step has begun."""
        if self._generation != self._program.generation:
            raise CaptureError(
                "a borrowed result was read after the next step had begun: its memory holds another step's numbers",
                hint='read it before the next call, clone it, or capture with `results="copied"`',
            )
        return self._value


class Maker(Protocol):
    """What capture hands to a captured program: how one more size is made, and what it was told."""

    def make(self, phase: PhaseCapture, size: int) -> CapturedSize | None:
        """Capture one size; None where the budget does not hold it."""
        ...

    def find(self, name: str) -> Place | None:
        """Return where an owner keeps a name now."""
        ...

    def runs(self) -> tuple[Callable[..., Any], ...]:
        """Return what runs without graphs, one for each choice of ranges; it reads what it is bound to now."""
        ...

    def rebind(self) -> None:
        """Bind the program anew, where it was bound anew since: to the memory that graphs read."""
        ...

    def renew(self) -> None:
        """Forget what was learned: the next capture learns it anew."""
        ...


@dataclass(frozen=True, eq=False)
class Parts:
    """All that a captured program is put together from."""

    plan: CapturePlan
    device: Device
    inputs: StaticInputs
    table: AddressTable
    maker: Maker
    observer: Observer
    leaves: Sequence[Any]
    checked: Any
    largest: int
    phase_of: Callable[[], str]
    current_step: Callable[[], Step | None]
    fixed: Mapping[str, Tensor]
