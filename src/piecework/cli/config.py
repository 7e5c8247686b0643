"""Options given as JSON or as dotted pairs, under our names and under those that users of vLLM know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from piecework.choices import near
from piecework.errors import OptionError
from piecework.options import CompileOptions

_OWN = tuple(each.name for each in fields(CompileOptions))
_BETWEEN_TICKS = re.compile(r"`(\w+)`")

# vLLM's name -> ours, where the meaning is the same.
_NAMES = {
    "backend": "compiler",
    "splitting_ops": "split_ops_only",
    "compile_sizes": "single_sizes",
    "debug_dump_path": "debug_folder",
    "level": "mode",
}
# What holds several: as text it is a list with commas, as on the option's own flag.
_NAME_LISTS = ("split_ops", "split_ops_only", "custom_ops", "passes")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_OF_CAPTURE = ("cudagraph_mode", "cudagraph_capture_sizes")
_SIZE_LISTS = ("single_sizes", "lazy_sizes")
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
        return name, json.loads(_PYTHON.get(value, value))
    except (ValueError, RecursionError):
        return name, value


def own_name(name: str) -> str:
    """Return our name for an option."""
    if name in _ENDPOINTS:
        return "ranges"
    return "partition" if name == _GRAPH_PARTITION else _NAMES.get(name, name)


def own_names(given: Mapping[str, Any], maximum: int, flag: str = "") -> dict[str, Any]:
    """Return options under our names; `maximum` closes the last range of those given by their endpoints.

    Lists may be texts with commas. `flag` stands before a name where it was typed.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = own_name(name)
        if own not in _OWN:
            known = (*_OWN, *_NAMES, *_ENDPOINTS, _GRAPH_PARTITION)
            if name in _OF_CAPTURE:
                hint = f"give it as a flag of its own, `--{name.replace('_', '-')}`"
                raise OptionError(f"option `{name}` is one of capture, not of compiling", hint=hint)
            raise OptionError(f"option `{name}` is unknown", hint=near(name, known), facts={"name": name})
        if own in found:
            raise OptionError(f"option `{own}` is given twice, under two names", hint="give it once")
        found[own] = _own_value(f"{flag}{name}", own, value, maximum)
    return found


def _own_value(name: str, own: str, value: Any, maximum: int) -> Any:
    last = name.rpartition(".")[2]
    if last in _ENDPOINTS and not isinstance(value, str):
        return ranges_between([value] if type(value) is int else value, maximum)
    if last == _GRAPH_PARTITION:
        if not isinstance(value, bool):
            raise OptionError(f"`{name}` is `{value!r}`", hint="give true or false")
        return "inductor" if value else "fx"
    if own in _SIZE_LISTS and type(value) is int:
        return (value,)
    if not isinstance(value, str):
        return value
    if own == "ranges":
        return parse_ranges(value, maximum)
    if own in _NAME_LISTS:
        return parse_names(value)
    if own in _SIZE_LISTS:
        return parse_numbers(value, name)
    return _MODES.get(value, value) if own == "mode" else value


@contextmanager
def told_as(typed: Mapping[str, str]) -> Iterator[None]:
    """Let an error name options as they were typed; `typed` says how, by our names."""
    try:
        yield
    except OptionError as error:

        def told(words: str) -> str:
            return _BETWEEN_TICKS.sub(lambda match: f"`{typed.get(match[1], match[1])}`", words)

        message = told(error.message)
        for own, words in typed.items() if len(typed) == 1 else ():
            if not words.replace("-", "_").endswith(own) and words not in message:
                message += f" (given as `{words}`)"
        raise OptionError(message, hint=told(error.hint), facts=error.facts) from error


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
