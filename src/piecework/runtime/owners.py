"""Whose memory a graph reads: every tensor from outside with its owner's name, and the check that none has moved.

A graph reads addresses. A parameter that was bound anew, a derived tensor that was built again, a cache that was
reallocated leaves the graph reading the old memory, and nothing fails. So each place that held a tensor at capture
is looked at on every step: is it the same tensor, at the same address?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor

from piecework.seam.addresses import address_check

_DEPTH = 6


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where an owner keeps a tensor: `container[key]`; `path` are the (container, key, member) on the way there."""

    name: str
    container: Any
    key: Any
    tensor: Tensor
    path: tuple[tuple[Any, Any, Any], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class External:
    """A tensor that graphs read from outside: `bound` is what they read, held so that its memory stays theirs.

    `address` is where the owner's tensor lay when last looked at: that of `bound`, or of the original which
    `bound` is a copy of. One that is not watched moves only together with something that is.
    """

    place: Place
    bound: Tensor
    address: int
    is_weight: bool = False
    is_watched: bool = True


def places_of(root: Any, name: str = "") -> Iterator[Place]:
    """Find the tensors that an owner holds: a module's parameters, buffers and attributes, or nested containers."""
    yield from _walk(root, name, (), set(), 0)


def _walk(value: Any, name: str, path: tuple[tuple[Any, Any, Any], ...], seen: set[int], depth: int) -> Iterator[Place]:
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    for container, key, child_name in _members(value, name):
        child = container[key]
        if isinstance(child, Tensor):
            yield Place(child_name, container, key, child, path)
        elif _may_hold_tensors(child):
            # Modules nest deep, and each is entered once; what else nests is followed a few levels.
            below = 0 if isinstance(child, torch.nn.Module) else depth + 1
            yield from _walk(child, child_name, (*path, (container, key, child)), seen, below)


def _members(value: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    dot = f"{name}." if name else ""
    if isinstance(value, torch.nn.Module):
        for container in (value._parameters, value._buffers, value._modules):
            yield from ((container, key, f"{dot}{key}") for key in list(container))
        own = value.__dict__
        yield from (
            (own, key, f"{dot}{key}")
            for key in list(own)
            if not key.startswith(("_parameters", "_buffers", "_modules"))
        )
    elif isinstance(value, Mapping):
        yield from ((value, key, f"{dot}{key}" if isinstance(key, str) else f"{name}[{key!r}]") for key in list(value))
    elif isinstance(value, list | tuple):
        yield from ((value, index, f"{name}[{index}]") for index in range(len(value)))
    elif hasattr(value, "__dict__"):
        own = vars(value)
        yield from ((own, key, f"{dot}{key}") for key in list(own))


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | Mapping | list | tuple) or dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    kind = type(value)
    return (
        kind.__module__ not in ("builtins", "torch", "functools") and hasattr(value, "__dict__") and not callable(value)
    )


class AddressTable:
    """All externals of some graphs; `moved` is the check of every step, `faults` says what it found.

    The check is made of whole-list operations: some hundred weights have to be looked at in a few microseconds.
    """

    def __init__(self) -> None:
        self._externals: list[External] = []
        self._known: set[tuple[int, Any]] = set()
        self._watched: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._members: list[Any] = []
        self._is_in_place: Callable[[], bool] = address_check((), ())
        self._bound_addresses: set[int] = set()
        self.unowned: dict[int, tuple[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._externals)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(external.place.name for external in self._externals)

    @property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(external.place.name for external in self._externals if external.is_weight)

    def reset(self) -> None:
        """Forget everything: what is captured next is recorded anew."""
        self._externals.clear()
        self._known.clear()
        self._watched.clear()
        self.unowned.clear()
        self._compile()

    def add(self, externals: Iterable[External]) -> None:
        """Record externals with their owners; a place that is known already is kept once."""
        for external in externals:
            known = (id(external.place.container), external.place.key)
            if known not in self._known:
                self._known.add(known)
                self._externals.append(external)
        self._compile()

    def watch(self, container: Any, key: Any) -> None:
        """Take it for a sign that externals may have moved when `container[key]` is another object."""
        self._watched[id(container), key] = (container, key, container[key])
        self._compile()

    def hold(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor alive that graphs read and that no known owner holds.

        Tensors:
            tensor  [...]  any  held until `reset`
        """
        self.unowned.setdefault(_address(tensor), (name, tensor))

    def knows(self, address: int) -> bool:
        """Tell whether memory that begins at this address is recorded."""
        return address in self.unowned or address in self._bound_addresses

    def _compile(self) -> None:
        checked = dict(self._watched)
        watched = [external for external in self._externals if external.is_watched]
        for external in watched:
            place = external.place
            for container, key, member in (*place.path, (place.container, place.key, place.tensor)):
                checked[id(container), key] = (container, key, member)
        self._containers = [container for container, _, _ in checked.values()]
        self._keys = [key for _, key, _ in checked.values()]
        self._members = [member for _, _, member in checked.values()]
        self._is_in_place = address_check([e.place.tensor for e in watched], [e.address for e in watched])
        self._bound_addresses = {_address(external.bound) for external in self._externals}

    def is_moved(self) -> bool:
        """Tell whether any owner's tensor is another one than at capture, or lies elsewhere."""
        try:
            same = all(map(is_, map(getitem, self._containers, self._keys), self._members))
        except (KeyError, IndexError, TypeError):
            return True
        return not same or not self._is_in_place()

    def faults(self) -> tuple[tuple[External, str], ...]:
        """Return what moved and how: the external, and `gone`, `replaced` or `moved`.

        Another tensor over the same memory has not moved: it is looked at instead from here on.
        """
        self._externals = [_follow(external) for external in self._externals]
        found = tuple((e, fault) for e in self._externals if (fault := _fault(e)))
        if not found:
            self._watched = {at: (c, key, c[key]) for at, (c, key, _) in self._watched.items()}
        self._compile()
        return found

    def repair(self, find: Callable[[str], Place | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Copy what moved back to where graphs read it; return the names of what was copied, and of what cannot be.

        `find` says where the owner keeps a name now.
        """
        copied: list[str] = []
        stuck: list[str] = []
        kept: list[External] = []
        for external in self._externals:
            fault = _fault(external)
            if not fault:
                kept.append(external)
                continue
            mended = _mend(external, find(external.place.name))
            (copied if mended is not None else stuck).append(external.place.name)
            kept.append(mended or external)
        self._externals = kept
        self._compile()
        return tuple(copied), tuple(stuck)


def external_of(place: Place, bound: Tensor, *, is_weight: bool = False, is_watched: bool = True) -> External:
    """Record one place as the owner of what graphs read as `bound`; a weight is what the program is bound to.

    Tensors:
        bound  [...]  any  fixed address while graphs that read it live
    """
    return External(place, bound, place.tensor.data_ptr(), is_weight, is_watched)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fault(external: External) -> str:
    place = external.place
    try:
        for container, key, member in place.path:
            if container[key] is not member:
                return "replaced"
        current = place.container[place.key]
    except (KeyError, IndexError, TypeError):
        return "gone"
    if current is not place.tensor:
        return "gone" if current is None else "replaced"
    return "" if current.data_ptr() == external.address else "moved"


def _follow(external: External) -> External:
    """Look at the tensor that stands in a place now, where it is the same memory in the same layout."""
    place = external.place
    try:
        current = place.container[place.key]
    except (KeyError, IndexError, TypeError):
        return external
    if current is place.tensor or not isinstance(current, Tensor) or current.data_ptr() != external.address:
        return external
    if any(getattr(current, what) != getattr(place.tensor, what) for what in ("shape", "dtype", "device")):
        return external
    if current.stride() != place.tensor.stride():
        return external
    return dataclasses.replace(external, place=dataclasses.replace(place, tensor=current))


def _mend(external: External, place: Place | None) -> External | None:
    """Copy the owner's tensor, where it is now, to the memory that graphs read, and give the owner that memory."""
    bound = external.bound
    if place is None or place.tensor.shape != bound.shape or place.tensor.dtype != bound.dtype:
        return None
    if place.tensor.device != bound.device or bound.data_ptr() == 0:
        return None
    with torch.no_grad():
        bound.copy_(place.tensor)
        # What the owner writes in place from now on must be seen by graphs, so both have one memory again.
        if isinstance(place.tensor, torch.nn.Parameter):
            place.tensor.data = bound
        elif hasattr(place.container, "__setitem__"):
            place.container[place.key] = bound
            place = dataclasses.replace(place, tensor=bound)
        else:
            return None
    return dataclasses.replace(external, place=place, address=bound.data_ptr())
