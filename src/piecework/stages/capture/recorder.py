"""Record the segments of one size: close a graph before each opaque call, open the next one after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from piecework.errors import CaptureError
from piecework.runtime.regions import BoundRegion
from piecework.runtime.segments import Segment, opaque_segment
from piecework.stages.capture.sources import MODEL
from piecework.stages.capture.walk import ResultNote, note_results, tensors_in
from piecework.values.declaration import registry
from piecework.values.device import Device, Graph
from piecework.values.graph import INLINE, OPAQUE
from piecework.values.tree import map_leaves

Notes = list[tuple[ResultNote, ...]]


class Observing:
    """A run without graphs that notes what each opaque call returns."""

    def __init__(self, opaque: frozenset[str]) -> None:
        self.notes: Notes = []
        self._opaque = opaque

    def region(self, region: BoundRegion, arguments: list[Any]) -> Sequence[Any]:
        """Run a region; note it if it is opaque."""
        found = region.call(*arguments)
        if region.is_opaque:
            self.notes.append(note_results(_title(region), arguments, found))
        return found

    def around(self, name: str, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an operator's call; note it if the operator is opaque."""
        found = operator(*args, **kwargs)
        if is_opaque(name, self._opaque):
            self.notes.append(note_results(name, [args, kwargs], as_tuple(found)))
        return found


class Recorder:
    """Segments of one size in the making.

    Opaque calls are not made while recording: their inputs hold no numbers yet, since a graph's work is noted and not
    done. What they return is known from the run before. Tensors that opaque segments take are kept by address alone,
    for the graphs' order keeps them whole; `owned` are the addresses of memory that others keep alive.
    """

    def __init__(self, device: Device, notes: Notes, opaque: frozenset[str], owned: frozenset[int]) -> None:
        self.segments: list[Segment] = []
        self.graphs: list[Graph] = []
        self.where = ""
        self._device = device
        self._notes = iter(notes)
        self._opaque = opaque
        self._owned = owned
        self._is_open = False

    def open(self) -> None:
        if self._is_open:
            return
        self._is_open = True  # before it begins: torch sets up its generator with operators that come by here too
        try:
            self._device.begin()
        except BaseException:
            self._is_open = False
            raise

    def close(self) -> None:
        """End the graph that is open; one in which nothing but allocation happened leaves no segment."""
        if self._is_open:
            self._is_open = False
            graph = self._device.end()
            if graph is not None:
                self.graphs.append(graph)
                self.segments.append(graph.replay)

    def inside(self, region: BoundRegion, arguments: list[Any]) -> Sequence[Any]:
        """Record a region as part of a graph, whatever its kind."""
        self.open()
        self.where = _title(region)
        if region.kind in (OPAQUE, INLINE, MODEL):  # the operators of what is not compiled are seen one by one
            return region.call(*arguments)
        return self._device.run(region.call, arguments)  # type: ignore[no-any-return]

    def between(self, region: BoundRegion, arguments: list[Any]) -> Sequence[Any]:
        """Record pieces as graphs, and opaque regions as calls between them."""
        if not region.is_opaque:
            return self.inside(region, arguments)
        self.where = _title(region)
        return self._call(self.where, region.call, arguments, {})

    def around(self, name: str, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an uncompiled model's operator: into the graph, or as a call between two."""
        self.where = name
        if not is_opaque(name, self._opaque):
            return operator(*args, **kwargs)
        declared = registry.get(name.partition(".")[0])
        body = declared.body if declared is not None and declared.body is not None else operator
        results = self._call(name, body, args, kwargs)
        self.where = f"after {name}"
        schema = getattr(operator, "_schema", None)
        count = len(schema.returns) if schema is not None else len(results)
        return None if count == 0 else results[0] if count == 1 else results

    def follow(self, name: str, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an uncompiled model's operator call as part of the graph, and remember which it was."""
        self.where = name
        return operator(*args, **kwargs)

    def _call(
        self, name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        notes = next(self._notes, None)
        if notes is None or any(note.name != name for note in notes):
            raise CaptureError(
                f"`{name}` was called while capturing, but not in the run before",
                hint="a model that is captured makes the same calls each time",
            )
        self.close()
        self.open()  # the results' own memory is allocated as part of the graph that reads it
        homes = [note.home(tensors_in([args, kwargs])) for note in notes]
        copied = [
            self._kept(home) if note.kind == "fresh" and home is not None and home.numel() else None
            for note, home in zip(notes, homes, strict=True)
        ]
        kept = map_leaves(lambda _, leaf: self._kept(leaf), list(args), "args")
        named = map_leaves(lambda _, leaf: self._kept(leaf), dict(kwargs), "kwargs")
        body = (lambda *given: as_tuple(call(*given, **named))) if named else call
        self.segments.append(opaque_segment(name, _returning_tuple(body, copied), kept, copied))
        return tuple(homes)

    def _kept(self, value: Any) -> Any:
        """Return what a segment keeps of an argument: memory of the pool by its address alone."""
        if not isinstance(value, Tensor) or value.untyped_storage().data_ptr() in self._owned:
            return value
        return self._device.alias(value)


def _returning_tuple(call: Callable[..., Any], homes: Sequence[Tensor | None]) -> Callable[..., Any]:
    if not any(home is not None for home in homes):
        return call
    return lambda *given: as_tuple(call(*given))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return an operator's result as a tuple; nothing is an empty one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def is_opaque(name: str, opaque: frozenset[str]) -> bool:
    """Tell whether `ns::op.overload` is among operators named with or without their overload."""
    return name in opaque or name.partition(".")[0] in opaque


def _title(region: BoundRegion) -> str:
    operators = ", ".join(dict.fromkeys(region.operators))
    return f"{region.name} ({operators})" if operators else region.name
