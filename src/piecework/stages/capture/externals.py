"""Find every tensor that graphs read from outside, with its owner's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from piecework.errors import CaptureError
from piecework.runtime.owners import AddressTable, External, Place, external_of, places_of
from piecework.runtime.program import Program
from piecework.runtime.regions import BoundRegion
from piecework.stages.capture.walk import tensors_in
from piecework.values.graph import PIECE


class Census:
    """Watches a run and keeps what its operators read or write but did not make: memory that graphs use as it lies."""

    def __init__(self, inputs: Iterable[Tensor], before_write: Callable[[Tensor], None] | None = None) -> None:
        self._before_write = before_write
        self.read: dict[int, tuple[str, Tensor]] = {}
        self.written: dict[int, tuple[str, Tensor]] = {}
        self.called: set[str] = set()
        self._made = {_address(tensor) for tensor in inputs}
        self._inputs = frozenset(self._made)
        self._kept: list[Tensor] = []
        self._is_paused = False

    def region(self, region: BoundRegion, arguments: list[Any]) -> Sequence[Any]:
        """Run a region. A piece reads its arguments and weights alone, and its kernels cannot be watched."""
        self._is_paused = region.kind == PIECE
        found = region.call(*arguments)
        self._is_paused = False
        self._make(found)
        return found

    def around(self, name: str, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an operator's call and note what it read from outside, and what it wrote to that it did not make."""
        if self._is_paused:
            return operator(*args, **kwargs)
        self.called.add(name.partition(".")[0])
        for tensor in tensors_in([args, kwargs]):
            address = _address(tensor)
            if address not in self._made and tensor.numel():
                self.read.setdefault(address, (name, tensor))
        self._note_writes(operator, args, kwargs)
        found = operator(*args, **kwargs)
        self._make(found)
        return found

    def _make(self, found: Any) -> None:
        for tensor in tensors_in([found]):
            # Kept to the end of the run, so that no later tensor lies at the address of an earlier one. A view of what
            # lies outside is not made here.
            if _address(tensor) not in self.read:
                self._made.add(_address(tensor))
            self._kept.append(tensor)

    def _note_writes(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for index, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in tensors_in([value]):
                    address = _address(tensor)
                    if address in self._inputs or (address not in self._made and tensor.numel()):
                        if self._before_write is not None:
                            self._before_write(tensor)
                        self.written.setdefault(address, (str(operator), tensor))

    def close(self) -> None:
        self._kept.clear()


class Owners:
    """Everything that is known to hold tensors: the model or program, and what the caller named."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)

    def add(self, name: str, root: Any) -> None:
        self._roots[name] = root

    def places(self) -> list[Place]:
        """Return every place of every owner, as it is now."""
        return [
            place
            for name, root in self._roots.items()
            for place in places_of(root.weights if isinstance(root, Program) else root, name)
        ]

    @property
    def programs(self) -> list[Program]:
        """The programs among the owners."""
        return [root for root in self._roots.values() if isinstance(root, Program)]

    def find(self, name: str) -> Place | None:
        return next((place for place in self.places() if place.name == name), None)


def record_externals(
    table: AddressTable, owners: Owners, weights: Mapping[str, Tensor], census: Census | None
) -> tuple[str, ...]:
    """Fill the table with what graphs read; return the names of those that no known owner holds.

    A weight belongs to whoever holds a tensor of its name or its address; so does whatever else was seen to be read.
    """
    places = owners.places()
    by_address: dict[int, list[Place]] = {}
    for place in places:
        if place.tensor.numel():
            by_address.setdefault(_address(place.tensor), []).append(place)
    by_name = {place.name: place for place in places}
    found: list[External] = []
    for name, tensor in weights.items():
        holders = by_address.get(_address(tensor), []) if tensor.numel() else []
        named = by_name.get(name)
        holders = holders or ([named] if named is not None else [])
        # A program's own weights change when it is bound anew and never else, so one look at that stands for all.
        shared = [place for place in holders if not any(place.container is p.weights for p in owners.programs)]
        for place in holders:
            found.append(external_of(place, tensor, is_weight=True, is_watched=not shared or place in shared))
    unowned = []
    for address, (operator, tensor) in census.read.items() if census is not None else ():
        holders = by_address.get(address, [])
        found.extend(external_of(place, place.tensor) for place in holders)
        if not holders and address not in {_address(weight) for weight in weights.values()}:
            label = f"a {_describe(tensor)} that `{operator}` reads"
            table.hold(label, tensor)
            unowned.append(label)
    table.add(found)
    for program in owners.programs:
        table.watch(vars(program), "bound")
    return tuple(unowned)


def refuse_written_inputs(census: Census, inputs: Mapping[str, Tensor]) -> None:
    """Raise where the model writes to an input that is copied: the caller's own tensor would never see it."""
    written = [name for name, tensor in inputs.items() if _address(tensor) in census.written]
    if written:
        raise CaptureError(
            f"the model writes to its input `{written[0]}`, which a captured program would copy",
            hint=f"name it at capture, fixed={{'{written[0]}': tensor}}, and pass that tensor in every call",
            facts={"inputs": written},
        )


def written_outside(census: Census, owners: Owners) -> dict[int, tuple[str, Tensor]]:
    """Return what the model writes beside its inputs, by address: what holds it, and a tensor of that memory.

    Tensors:
        ->  [...]  any  as the model wrote to it
    """
    names = {_address(place.tensor): f"`{place.name}`" for place in reversed(owners.places()) if place.tensor.numel()}
    return {a: (names.get(a, f"what `{name}` writes to"), tensor) for a, (name, tensor) in census.written.items()}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} tensor"
