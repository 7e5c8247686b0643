"""What a tracer calls the places that it read values from, as people write them."""

from __future__ import annotations

import re
import sys
from typing import Any

_IMPORT = re.compile(r"G\['__import_(\w+?)'\]")
_GLOBAL = re.compile(r"\bG\['(\w+)'\]")
_TABLE = re.compile(
    r"\._(?:modules|parameters|buffers)\['(\w+)'\]|\.__dict__\['(\w+)'\]|(?<=\w)\['(?:_modules|_parameters|_buffers)'\]"
)
_GIVEN = re.compile(r"L\['(\w+)'\]")
_KEYS = re.compile(r"___dict_keys\((.*?)\)")
_NUMPY = re.compile(r"___from_numpy\((.*)\)")

# What a class attribute is looked up by: a tracer writes the place in the order of classes where it found it.
OWNER, FOUND = "___owner", "___found"
_ON_CLASS = re.compile(r"dict\(type\(((?:[^()]|\([^()]*\))*)\)\.__mro__\[\d+\]\.__dict__\)\[('\w+')\]")
_OWNER = re.compile(rf"{OWNER}\((?:type\((.*)\)|(.*)), '(\w+)'\)")
_FOUND = re.compile(rf"{FOUND}\(type\((.*)\), '(\w+)'\)")


def on_class(source: str) -> str:
    """Write a place on a class as what it is a look-up of, so that a class which comes to stand before it is seen."""
    return _ON_CLASS.sub(rf"{FOUND}(type(\1), \2)", source)


def class_source(kind: type) -> str:
    """Write where a class is found by its module and name, which stands for all its objects; empty where it is not."""
    place: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        place = getattr(place, part, None)
    return f"G['__import_{kind.__module__.replace('.', '_dot_')}'].{kind.__qualname__}" if place is kind else ""


def owner_of(kind: type, name: str) -> str:
    """Return the class whose attribute `name` is found on a class, as `module:qualname`; empty where none has it."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    return f"{owner.__module__}:{owner.__qualname__}" if owner is not None else ""


def found_on(kind: type, name: str) -> Any:
    """Return what stands on a class under a name, as it stands there; raise AttributeError where nothing does."""
    for one in kind.__mro__:
        if name in vars(one):
            return vars(one)[name]
    raise AttributeError(name)


def readable_source(source: str) -> str:
    """Write `L['model']._modules['layers']._modules['0'].eps` as `model.layers.0.eps`."""
    text = _IMPORT.sub(lambda match: match[1].replace("_dot_", "."), source)
    text = _TABLE.sub(lambda match: f".{match[1] or match[2]}" if match[1] or match[2] else "", text)
    text = _FOUND.sub(r"\1.\2", _OWNER.sub(lambda m: f"the class of {m[1] or m[2]}.{m[3]}", text))
    text = _NUMPY.sub(r"\1", text)
    return _KEYS.sub(r"keys of \1", _GLOBAL.sub(r"\1", _GIVEN.sub(r"\1", text)))


def readable_value(kind: str, value: str) -> str:
    """Write a fact's value, which is kept as `float:1e-05`, as it is written in code."""
    if kind == "code":
        return f"code {value[:12]}"
    if kind == "type":
        return value.rpartition(":")[2]
    return value.partition(":")[2] if kind == "equal" and re.match(r"\w+:", value) and value[:1].islower() else value
