"""What a tracer calls the places that it read values from, as people write them."""

from __future__ import annotations

import re

_IMPORT = re.compile(r"G\['__import_(\w+?)'\]")
_GLOBAL = re.compile(r"\bG\['(\w+)'\]")
_TABLE = re.compile(
    r"\._(?:modules|parameters|buffers)\['(\w+)'\]|\.__dict__\['(\w+)'\]|(?<=\w)\['(?:_modules|_parameters|_buffers)'\]"
)
_GIVEN = re.compile(r"L\['(\w+)'\]")
_KEYS = re.compile(r"___dict_keys\((.*?)\)")


def readable_source(source: str) -> str:
    """Write `L['model']._modules['layers']._modules['0'].eps` as `model.layers.0.eps`."""
    text = _IMPORT.sub(lambda match: match[1].replace("_dot_", "."), source)
    text = _TABLE.sub(lambda match: f".{match[1] or match[2]}" if match[1] or match[2] else "", text)
    return _KEYS.sub(r"keys of \1", _GLOBAL.sub(r"\1", _GIVEN.sub(r"\1", text)))


def readable_value(kind: str, value: str) -> str:
    """Write a fact's value, which is kept as `float:1e-05`, as it is written in code."""
    if kind == "code":
        return f"code {value[:12]}"
    if kind == "type":
        return value.rpartition(":")[2]
    return value.partition(":")[2] if kind == "equal" and re.match(r"\w+:", value) and value[:1].islower() else value
