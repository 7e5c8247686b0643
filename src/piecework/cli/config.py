"""Options given as JSON or as dotted pairs, under our names and under those that users of vLLM know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from piecework.errors import OptionError

# vLLM's name -> ours, where the meaning is the same.
_NAMES = {
    "backend": "compiler",
    "splitting_ops": "split_ops_only",
    "compile_sizes": "single_sizes",
    "debug_dump_path": "debug_folder",
    "level": "mode",
}
_ENDPOINTS = ("compile_ranges_endpoints", "compile_ranges_split_points")
_GRAPH_PARTITION = "use_inductor_graph_partition"
_MODES = {
    "NONE": "none",
    "STOCK_TORCH_COMPILE": "stock",
    "DYNAMO_TRACE_ONCE": "trace_once",
    "VLLM_COMPILE": "piecewise",
}


def read_json(text: str, flag: str) -> dict[str, Any]:
    """Read an object of options."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"`{flag}` is not JSON: {error}",
            hint=f"""write it as {flag} '{{"mode": 3}}', in single quotes for the shell""",
        ) from error
    if not isinstance(value, dict):
        raise OptionError(
            f"`{flag}` holds a {type(value).__name__}, not an object",
            hint=f"""write it as {flag} '{{"mode": 3}}'""",
        )
    return value


def read_pair(text: str) -> tuple[str, Any]:
    """Read `name=value`; a value that is no JSON is taken as text."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise OptionError(f"`-cc.{text}` has no value", hint="write it as -cc.mode=0")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def own_names(given: Mapping[str, Any], maximum: int) -> dict[str, Any]:
    """Return options under our names; `maximum` closes the last range of those given by their endpoints."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ENDPOINTS:
            name, value = "ranges", ranges_between(value, maximum)
        if name == _GRAPH_PARTITION:
            name, value = "partition", "inductor" if value else "fx"
        name = _NAMES.get(name, name)
        if name in found:
            raise OptionError(f"option `{name}` is given twice, under two names", hint="give it once")
        found[name] = _MODES.get(value, value) if name == "mode" and isinstance(value, str) else value
    return found


def ranges_between(endpoints: Any, maximum: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges that end at each of `endpoints`, and at `maximum`."""
    if not isinstance(endpoints, list | tuple) or not all(type(end) is int and end > 0 for end in endpoints):
        raise OptionError(f"endpoints of ranges are `{endpoints!r}`", hint="give whole numbers, as in [64, 8192]")
    ends = sorted({end for end in endpoints if end < maximum} | {maximum})
    return tuple(zip([1, *(end + 1 for end in ends)], ends, strict=False))


def parse_ranges(text: str, maximum: int) -> tuple[tuple[int, int], ...]:
    """Read `1-64,65-8192`, or endpoints as `64,8192`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        pairs = [tuple(int(side) for side in part.split("-")) for part in parts]
    except ValueError:
        pairs = []
    if pairs and all(len(pair) == 1 for pair in pairs):
        return ranges_between([pair[0] for pair in pairs], maximum)
    if not pairs or not all(len(pair) == 2 for pair in pairs):
        raise OptionError(f"ranges `{text}` are not pairs of sizes", hint="write them as 1-64,65-8192")
    return tuple((pair[0], pair[1]) for pair in pairs)


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Read `1,2,3`."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError as error:
        raise OptionError(f"`{flag}` is `{text}`", hint=f"give whole numbers, as in {flag} 1,2,3") from error


def parse_names(text: str) -> tuple[str, ...]:
    """Read `ns::op,ns::op`; the empty text is no name."""
    return tuple(text.replace(",", " ").split())
