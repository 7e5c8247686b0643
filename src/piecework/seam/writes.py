"""What forward writes to Python state while it is traced: attributes, globals, closures, lists, iterators.

Dynamo notes each write and makes them all after the graph's first call; a program makes none. So each that would leave
something else than was there is told, with the line that writes it.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecework.errors import TraceError
from piecework.seam.kinds import mutated_arguments, storage_of
from piecework.seam.lines import at, line_of, line_of_first
from piecework.values.sources import readable_source

_TABLES = ("_buffers", "_parameters", "_modules")
_ABSENT = object()


@dataclass(frozen=True)
class Write:
    """One thing that forward leaves changed: what it is, as people write it, and the line that changes it."""

    place: str
    file: str
    line: int


@dataclass(frozen=True)
class Writes:
    """What a trace would leave changed, and the tensors of modules that it writes in place and puts back (`a += b`)."""

    lost: tuple[Write, ...] = ()
    in_place: tuple[torch.Tensor, ...] = ()


def find_writes(graph: fx.Graph) -> Writes:
    """Return what the trace that runs in this thread, and gave `graph`, writes, in the order of first use."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    notes = _Notes(output.side_effects)
    found = list(notes.writes())
    if output.random_calls:
        drawn = [node for node in graph.find_nodes(op="placeholder") if source_of(node).startswith("random_value")]
        found.append(Write("the state of `random`", *line_of_first(user for node in drawn for user in node.users)))
    return Writes(tuple(dict.fromkeys(found)), tuple(notes.in_place))


def source_of(placeholder: fx.Node) -> str:
    """Return Dynamo's text of where an input of the graph is read; empty for a size."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return "" if source is None else str(source.name)


def refuse_tensor_writes(graph: fx.Graph, owned: Mapping[fx.Node, str]) -> None:
    """Raise where a graph writes to a tensor that no module holds: a program has a copy of such a one.

    `owned` are the placeholders of those tensors, each with the text of where it is read.
    """
    places = {storage_of(node.meta.get("example_value")): name for node, name in owned.items()}
    for node in graph.nodes:
        for written in mutated_arguments(node):
            name = places.get(storage_of(written.meta.get("example_value")), "")
            if name:
                refuse([Write(f"to the tensor `{readable_source(name)}`", *line_of(node))])


def refuse(writes: Sequence[Write]) -> None:
    """Raise for the first write, where there is any."""
    for write in writes:
        raise TraceError(
            f"forward writes {write.place}{at((write.file, write.line))}",
            hint="a compiled forward does not run its Python again: return the value, keep it in an opaque operator, "
            "or, for a tensor, in a buffer that is written in place",
            facts={"written": write.place, "file": write.file, "line": write.line},
        )


class _Notes:
    """What Dynamo noted of one trace: tracked objects, each with its value after the trace."""

    def __init__(self, effects: Any) -> None:
        self._effects = effects
        self._objects = {id(item): item for item in effects.keepalive}
        self.in_place: list[torch.Tensor] = []

    def writes(self) -> Iterator[Write]:
        """Yield what is another thing than before, with the line that made it so."""
        for key, variable in list(self._effects.id_to_variable.items()):
            exists = type(variable.mutation_type).__name__.endswith("Existing")
            if exists and self._effects.is_modified(variable):
                stacks = self._effects.mutation_user_stacks
                lines = stacks.get(variable) or stacks.get(_base(variable)) or ()
                for place, name in self._changed(variable, self._objects.get(key)):
                    yield Write(place, *_line(lines, name))

    def _changed(self, variable: Any, item: Any) -> Iterator[tuple[str, str]]:
        """Yield (place, attribute's name) of what a tracked object holds that it did not hold."""
        kind, source = type(variable).__name__, _source(variable)
        for name, value in self._effects.store_attr_mutations.get(variable, {}).items():
            if kind == "NewGlobalVariable":
                yield f"the global `{source}`", name
            elif kind == "CellVariable":
                if not self._is_same(value, getattr(item, "cell_contents", _ABSENT)):
                    yield f"the variable `{variable.local_name or source}` of a closure", variable.local_name or ""
            elif not self._is_kept(item, name, value):
                yield _attribute(source, item, name), name
        inner = _base(variable) or variable
        if not getattr(inner.mutation_type, "is_modified", False) or self._holds_same(inner, item):
            return
        module, _, table = source.rpartition(".")
        if table in _TABLES and isinstance(item, dict):
            yield from ((_attribute(module, None, name), name) for name in self._other_keys(inner, item))
        else:
            yield _inside(source, item), ""

    def _is_kept(self, item: Any, name: str, value: Any) -> bool:
        """Tell whether a write leaves an attribute as it was, or keeps what the class says is computed once."""
        held = vars(item).get(name, _ABSENT) if hasattr(item, "__dict__") else _ABSENT
        is_cached = isinstance(inspect.getattr_static(type(item), name, None), functools.cached_property)
        if held is _ABSENT and is_cached:
            return True
        before = getattr(item, name, _ABSENT)
        if type(value).__name__ == "DeletedVariable":
            return before is _ABSENT
        return self._is_same(value, before) or self._is_put_back(item, value, before)

    def _is_same(self, variable: Any, value: Any) -> bool:
        """Tell whether a traced value is the very object, or equal and of one type where it is a plain value."""
        variable = variable.realize() if hasattr(variable, "realize") else variable
        if self._effects.id_to_variable.get(id(value)) is variable:
            return True
        if variable.is_python_constant():
            constant = variable.as_python_constant()
            is_plain = isinstance(constant, int | float | str | bytes | complex | None | type(...))
            return constant is value or (is_plain and type(constant) is type(value) and repr(constant) == repr(value))
        return value is not _ABSENT and getattr(variable, "value", _ABSENT) is value

    def _is_put_back(self, item: Any, variable: Any, value: Any) -> bool:
        """Tell whether a module's tensor is what an operation in place on it gave, as in `self.seen += x`."""
        if not isinstance(value, torch.Tensor) or not isinstance(item, torch.nn.Module):
            return False
        try:
            node = variable.as_proxy().node
        except (NotImplementedError, AttributeError):
            return False
        while node.args and mutated_arguments(node) == node.args[:1]:
            node = node.args[0]
        is_own = node.op == "placeholder" and getattr(node.meta.get("grapharg"), "example", None) is value
        self.in_place += [value] if is_own else []
        return is_own

    def _holds_same(self, variable: Any, item: Any) -> bool:
        """Tell whether a container holds what it held: a change that was taken back is none."""
        held: Any = getattr(variable, "items", None)
        if isinstance(held, list) and (isinstance(item, list) or hasattr(item, "popleft")):
            return len(held) == len(item) and all(map(self._is_same, held, item))
        if isinstance(held, dict) and isinstance(item, Mapping):
            keys = [key.vt for key in held]
            same = len(keys) == len(item) and all(map(self._is_same, keys, item))
            return same and all(map(self._is_same, held.values(), item.values()))
        try:
            return type(item) is set and bool(variable.as_python_constant() == item)
        except (NotImplementedError, torch._dynamo.exc.TorchDynamoException):
            return False

    def _other_keys(self, variable: Any, item: Mapping[str, Any]) -> list[str]:
        """Return the keys of a module's table that hold something else than before."""
        held = {key.vt.as_python_constant(): value for key, value in variable.items.items()}
        owner = torch.nn.Module()
        found = [key for key in item if key not in held]
        for key, value in held.items():
            before = item.get(key, _ABSENT)
            if not self._is_same(value, before) and not self._is_put_back(owner, value, before):
                found.append(key)
        return found


def _base(variable: Any) -> Any:
    """Return what holds the items of an object whose class derives from a container."""
    return getattr(variable, "_base_vt", None)


def _source(variable: Any) -> str:
    """Return where an object is read: from the model, from an argument by its name, or from a global."""
    try:
        text = readable_source(variable.source.name) if variable.source is not None else ""
    except NotImplementedError:
        return ""
    return re.sub(r"^kwargs\['(\w+)'\]", r"\1", text)


def _attribute(source: str, item: Any, name: str) -> str:
    if isinstance(item, types.ModuleType):
        return f"the global `{item.__name__}.{name}`"
    if isinstance(item, type):
        return f"the class attribute `{item.__qualname__}.{name}`"
    return f"the attribute `{f'{source}.{name}'.removeprefix('model.')}`"


def _inside(source: str, item: Any) -> str:
    kind = type(item).__name__
    if source.startswith("model."):
        return f"inside the attribute `{source.removeprefix('model.')}`, a `{kind}`"
    return f"inside `{source}`, a `{kind}`" if source else f"inside a `{kind}`"


def _line(stacks: Sequence[Any], name: str) -> tuple[str, int]:
    """Return where a write stands: the innermost line that is not torch's, of the stack that names the attribute."""
    lines = []
    for stack in stacks:
        own = [frame for frame in stack if "/torch/" not in frame.filename] or list(stack)
        lines += own[-1:]
    frame = next((frame for frame in lines if name and name in (frame.line or "")), lines[0] if lines else None)
    return (frame.filename, frame.lineno) if frame is not None else ("", 0)
