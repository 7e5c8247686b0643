"""Nested arguments and results as leaves with paths; torch-free.

A path is the Python text that reaches the leaf from the argument's name: `extra["k"][0].hidden`. A
result's shape is kept as a plain-data tree, so that a fresh process can build it without a trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from piecework.errors import TraceError

Tree = dict[str, Any]


def children(value: Any, path: str) -> Iterator[tuple[str, Any, Any]] | None:
    """Yield (path, key, child) for a container; return None for a leaf.

    Containers are tuples, lists, dictionaries (also those with attributes, as model outputs are) and
    dataclasses.
    """
    if isinstance(value, Mapping):
        return ((f"{path}[{key!r}]", key, child) for key, child in value.items())
    if isinstance(value, tuple | list):
        return ((f"{path}[{index}]", index, child) for index, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return ((f"{path}.{name}", name, getattr(value, name)) for name in names)
    return None


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) in order, depth first."""
    inner = children(value, path)
    if inner is None:
        yield path, value
        return
    for child_path, _, child in inner:
        yield from leaves(child, child_path)


def containers(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, keys) of each dictionary and (path, length) of each list or tuple inside nested `value`."""
    inner = children(value, path)
    if inner is None:
        return
    items = list(inner)
    if isinstance(value, Mapping):
        yield path, [key for _, key, _ in items]
    elif isinstance(value, tuple | list):
        yield path, len(items)
    for child_path, _, child in items:
        yield from containers(child, child_path)


def map_leaves(function: Callable[[str, Any], Any], value: Any, path: str) -> Any:
    """Return a copy of nested `value` with each leaf replaced by `function(path, leaf)`."""
    inner = children(value, path)
    if inner is None:
        return function(path, value)
    parts = {key: map_leaves(function, child, child_path) for child_path, key, child in inner}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    if isinstance(value, tuple | list):
        return type(value)(parts.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **parts)
    return type(value)(parts)


def describe(value: Any, leaf: Callable[[str, Any], Tree], path: str = "result") -> Tree:
    """Write nested `value` as a plain-data tree, each leaf by `leaf(path, value)`."""
    inner = children(value, path)
    if inner is None:
        return leaf(path, value)
    items = [(key, describe(child, leaf, child_path)) for child_path, key, child in inner]
    if type(value) in (tuple, list):
        return {"kind": type(value).__name__, "items": [item for _, item in items]}
    if type(value) is dict:
        if not all(isinstance(key, str | int) for key, _ in items):
            raise TraceError(f"`{path}` is a dictionary whose keys are neither strings nor whole numbers")
        return {"kind": "dict", "items": [[key, item] for key, item in items]}
    kind = type(value)
    if "<locals>" in kind.__qualname__:
        raise TraceError(
            f"`{path}` is a `{kind.__qualname__}`, which no other process can import",
            hint="define the class at the top level of a module",
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):  # torch.Size: made of one sequence
        return {"kind": "sequence", "class": name, "items": [item for _, item in items]}
    if isinstance(value, Mapping) and not all(isinstance(key, str) and key.isidentifier() for key, _ in items):
        if not all(isinstance(key, str | int) for key, _ in items):
            raise TraceError(f"`{path}` is a dictionary whose keys are neither strings nor whole numbers")
        return {"kind": "mapping", "class": name, "items": [[key, item] for key, item in items]}
    fields = [[key, item] for key, item in items if item.get("kind") != "constant" or item.get("value") is not None]
    return {"kind": "object", "class": name, "items": fields}


_KEYED = ("dict", "mapping", "object")


def tree_leaves(tree: Tree) -> Iterator[Tree]:
    """Yield the leaves of a described result, in order."""
    if "items" not in tree:
        yield tree
        return
    for item in tree["items"]:
        yield from tree_leaves(item[1] if tree["kind"] in _KEYED else item)


def map_tree(function: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Return a described result with each leaf replaced by `function(leaf)`."""
    if "items" not in tree:
        return function(tree)
    if tree["kind"] in _KEYED:
        return {**tree, "items": [[key, map_tree(function, item)] for key, item in tree["items"]]}
    return {**tree, "items": [map_tree(function, item) for item in tree["items"]]}


def render(tree: Tree, classes: dict[str, str]) -> str:
    """Write the Python expression that builds a described result.

    `classes` collects name -> `module:qualname` of the classes which the expression's namespace must hold.
    """
    kind = tree["kind"]
    if kind == "value":
        return str(tree["expression"])
    if kind == "constant":
        return repr(tree["value"])
    if kind == "tuple":
        inner = ", ".join(render(item, classes) for item in tree["items"])
        return f"({inner},)" if len(tree["items"]) == 1 else f"({inner})"
    if kind == "list":
        return f"[{', '.join(render(item, classes) for item in tree['items'])}]"
    if kind == "dict":
        return f"{{{', '.join(f'{key!r}: {render(item, classes)}' for key, item in tree['items'])}}}"
    name = f"class_{len(classes)}"
    classes[name] = tree["class"]
    if kind in ("sequence", "mapping"):
        plain = {**tree, "kind": "list" if kind == "sequence" else "dict"}
        return f"{name}({render(plain, classes)})"
    if tree["items"] and not all(str(key).isidentifier() for key, _ in tree["items"]):
        return f"{name}({', '.join(render(item, classes) for _, item in tree['items'])})"
    return f"{name}({', '.join(f'{key}={render(item, classes)}' for key, item in tree['items'])})"
