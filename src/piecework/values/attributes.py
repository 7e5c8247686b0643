"""What a model's modules hold beside weights: seen before and after a trace, to find what forward writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from piecework.errors import TraceError
from piecework.values.tree import leaves

_TABLES = ("_parameters", "_modules", "_buffers")
_ABSENT = object()
_DEEPEST = 4
Attributes = dict[tuple[str, str], Any]


def read_attributes(model: Any) -> Attributes:
    """Return every attribute, buffer and parameter of every module, with copies of what containers and objects hold."""
    found: Attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _TABLES:
                found |= {(path, member): tensor for member, tensor in value.items()} if name != "_modules" else {}
            elif name != "training" and "hook" not in name:
                found[path, name] = _copied(value)
    return found


@dataclass(frozen=True)
class _Held:
    """What a container or an object held: a write inside it leaves the attribute the same object."""

    place: Any
    inside: Any


def _copied(value: Any, depth: int = _DEEPEST) -> Any:
    """Copy containers, and the attributes of plain objects, as deep as a model is likely to keep its state."""
    if type(value) in (list, dict):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        return _Held(value, {key: _copied(member, depth - 1) if depth else member for key, member in members})
    if type(value) is set:
        return _Held(value, set(value))
    if depth and _is_plain(value):
        return _Held(value, {name: _copied(member, depth - 1) for name, member in vars(value).items()})
    return value


def _is_plain(value: Any) -> bool:
    """Tell whether an object is of a class written in Python beside torch's own: what a model keeps its state in."""
    kind = type(value)
    is_own = not isinstance(value, type) and kind.__module__.partition(".")[0] not in ("torch", "builtins", "types")
    return is_own and type(getattr(value, "__dict__", None)) is dict and not hasattr(value, "named_modules")


def refuse_writes(model: Any, before: Attributes, in_place: Sequence[Any] = ()) -> None:
    """Raise for the first attribute that is another one now, after putting it back as it was.

    A tensor of `in_place` is put back only: what was written was written into it.
    """
    kept = set(map(id, in_place))
    after = read_attributes(model)
    for key in {**before, **after}:
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if _is_same(old, new):
            continue
        path, name = key
        _put_back(model.get_submodule(path), name, old)
        if id(old) in kept:
            continue
        raise TraceError(
            f"forward writes the attribute `{f'{path}.{name}' if path else name}`",
            hint="a compiled forward does not run its Python again: return the value, or keep it in an opaque operator",
            facts={"attribute": name, "module": path},
        )


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, _Held) and isinstance(new, _Held):
        is_object = not isinstance(old.place, dict | list | set)
        old, new = old.inside, new.inside
        if is_object:  # what an object did not have is a value that it keeps once it was asked for
            new = {name: new[name] for name in old if name in new}
    if type(old) is not type(new):
        return False
    if isinstance(new, dict):
        return old.keys() == new.keys() and all(_is_same(old[key], new[key]) for key in old)
    if isinstance(new, tuple):
        return len(old) == len(new) and all(map(_is_same, old, new))
    return _equal(old, new)


def _equal(old: Any, new: Any) -> bool:
    return isinstance(new, int | float | str | bool | bytes | set | frozenset) and type(old) is type(new) and old == new


def _restored(old: Any) -> Any:
    """Give a container or an object what it held, and return it."""
    if not isinstance(old, _Held):
        return old
    place, inside = old.place, old.inside
    if isinstance(place, set):
        place.clear()
        place.update(inside)
        return place
    held = {key: _restored(member) for key, member in inside.items()}
    table = place if isinstance(place, list | dict) else vars(place)
    table.clear()
    table.extend(held.values()) if isinstance(table, list) else table.update(held)
    return place


def _put_back(module: Any, name: str, old: Any) -> None:
    if old is _ABSENT:
        delattr(module, name)
        return
    old = _restored(old)
    table = next((t for t in ("_parameters", "_buffers") if name in getattr(module, t)), "")
    if table:
        getattr(module, table)[name] = old
    else:
        setattr(module, name, old)


def plain_tensors(model: Any, is_tensor: type) -> Iterator[tuple[str, Any]]:
    """Yield (qualified name, tensor) of the tensors that modules hold as plain attributes."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                prefix = f"{path}.{name}" if path else name
                yield from ((p, leaf) for p, leaf in leaves(value, prefix) if isinstance(leaf, is_tensor))


def read_path(model: Any, name: str) -> Any:
    """Return what a qualified name reaches on a model, or None where it reaches nothing."""
    place, members = model, re.split(r"\.|(?=\[)", name)
    try:
        for member in members:
            place = place[ast.literal_eval(member[1:-1])] if member.startswith("[") else getattr(place, member)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, SyntaxError):
        return None
    return place
