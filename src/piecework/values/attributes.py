"""What a model's modules hold beside weights: seen before and after a trace, to find what forward writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from piecework.errors import TraceError
from piecework.values.tree import leaves

_TABLES = ("_parameters", "_modules", "_buffers")
_ABSENT = object()
Attributes = dict[tuple[str, str], Any]


def read_attributes(model: Any) -> Attributes:
    """Return every attribute, buffer and parameter of every module, containers copied one level deep."""
    found: Attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _TABLES:
                found |= {(path, member): tensor for member, tensor in value.items()} if name != "_modules" else {}
            elif name != "training" and "hook" not in name:
                found[path, name] = _copied(value)
    return found


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (dict, list, set) else value


def refuse_writes(model: Any, before: Attributes) -> None:
    """Raise for the first attribute that is another one now, after putting it back as it was."""
    after = read_attributes(model)
    for key in {**before, **after}:
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if _is_same(old, new):
            continue
        path, name = key
        _put_back(model.get_submodule(path), name, old)
        raise TraceError(
            f"forward writes the attribute `{f'{path}.{name}' if path else name}`",
            hint="a compiled forward does not run its Python again: return the value, or keep it in an opaque operator",
            facts={"attribute": name, "module": path},
        )


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(new, dict):
        return old.keys() == new.keys() and all(old[key] is new[key] or _equal(old[key], new[key]) for key in old)
    if isinstance(new, list | tuple):
        return len(old) == len(new) and all(one is two or _equal(one, two) for one, two in zip(old, new, strict=True))
    return _equal(old, new)


def _equal(old: Any, new: Any) -> bool:
    return isinstance(new, int | float | str | bool | bytes | set | frozenset) and type(old) is type(new) and old == new


def _put_back(module: Any, name: str, old: Any) -> None:
    if old is _ABSENT:
        delattr(module, name)
        return
    current: Any = getattr(module, name, None)
    if type(old) in (dict, list, set) and type(current) is type(old):
        current.clear()
        (current.extend if isinstance(current, list) else current.update)(old)
        return
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
