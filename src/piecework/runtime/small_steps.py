"""Steps of few tokens, again and again: at such a size a program's memory and views are made once.

A small step spends most of its time on allocations and views. When a size comes back, the pieces are bound to that very
size: what stays inside the program lies at fixed addresses, and only what the caller gets is allocated anew. Opaque
bodies are handed tensors that hold until the next step, which `split_op` makes part of their contract. While one thread
is in such a step, another thread's step runs in the general form.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecework.values.graph import PIECE

LARGEST = 32  # tokens; above it kernels take longer than what is saved
AFTER = 3  # steps of a size before it is worth the memory
MOST = 8  # sizes kept for one choice of ranges
MOST_BYTES = 64 << 20

Run = Callable[..., Any]


class SmallSteps:
    """One choice of ranges: `general` serves every size of it, `make` binds the program to one."""

    def __init__(self, general: Run, make: Callable[[Mapping[str, int]], tuple[Run, int] | None]) -> None:
        self._general = general
        self._make = make
        self._made: OrderedDict[Any, Run] = OrderedDict()
        self._bytes: dict[Any, int] = {}
        self._counts: dict[Any, int] = {}
        self._lock = threading.Lock()

    def dispatch(self, symbols: Sequence[str], parameters: Sequence[str]) -> Run:
        """Return the run that callers use: a size that was bound runs so, all others in the general form."""
        passed = ", ".join(parameters)
        key = symbols[0] if len(symbols) == 1 else f"({', '.join(symbols)})"
        source = (
            f"def run({passed}):\n"
            f"    made = find({key})\n"
            f"    if made is not None and enter(False):\n"
            f"        try: return made({passed})\n"
            f"        finally: leave()\n"
            f"    if {symbols[0]} <= {LARGEST}: note({key}, {{{', '.join(f'{s!r}: {s}' for s in symbols)}}})\n"
            f"    return general({passed})\n"
        )
        space: dict[str, Any] = {
            "find": self._made.get,
            "enter": self._lock.acquire,
            "leave": self._lock.release,
            "note": self._note,
            "general": self._general,
        }
        exec(compile(source, "<piecework small steps>", "exec"), space)
        space["run"].general = self._general  # what a capture takes apart
        return space["run"]  # type: ignore[no-any-return]

    def _note(self, key: Any, sizes: Mapping[str, int]) -> None:
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count != AFTER or not self._lock.acquire(blocking=False):
            return
        try:
            made = self._make(sizes)
            if made is not None and made[1] <= MOST_BYTES:
                self._keep(key, *made)
        finally:
            self._lock.release()

    def _keep(self, key: Any, run: Run, size_bytes: int) -> None:
        while self._made and (len(self._made) >= MOST or sum(self._bytes.values()) + size_bytes > MOST_BYTES):
            old, _ = self._made.popitem(last=False)
            del self._bytes[old]
            self._counts[old] = 0
        self._made[key], self._bytes[key] = run, size_bytes


def bind_sizes(
    regions: Sequence[Mapping[str, Any]],
    pieces: Mapping[int, Any],
    static: Mapping[str, torch.Tensor],
    result_names: frozenset[str],
    sizes: Mapping[str, int],
) -> tuple[dict[str, Run], int] | None:
    """Bind each site's piece to `sizes`; return the callables by name and the bytes they keep, None if none can.

    `pieces` are the loaded pieces by region, `static` the weights by value name, `result_names` what the caller gets.

    Tensors:
        static  [...]  any  read at their addresses in every call
    """
    fresh = _reaching_result(regions, result_names, static)
    known: dict[str, torch.Tensor] = {}
    calls: dict[str, Run] = {}
    bound = size_bytes = 0
    for index, region in enumerate(regions):
        if region["kind"] != PIECE:
            continue
        piece = pieces[index]
        weights = [static[name] for name in region["arguments"] if name in static]
        passed = [name for name in region["arguments"] if name not in static]
        given = {p: known[name] for p, name in zip(_parameters(piece), passed, strict=False) if name in known}
        own = {f"s{i}": sizes[symbol] for i, symbol in enumerate(region["symbols"])}
        new = [i for i, name in enumerate(region["results"]) if name in fresh]
        made = piece.bind_static(weights, own, fresh=new, given=given) if hasattr(piece, "bind_static") else None
        if made is None:
            calls[f"piece_{index}"] = piece.bind(weights)
            continue
        bound += 1
        calls[f"piece_{index}"] = made.call
        for position, tensor in made.outputs.items():
            known[region["results"][position]] = tensor
            size_bytes += tensor.numel() * tensor.element_size()
    return (calls, size_bytes) if bound else None


def _parameters(piece: Any) -> tuple[str, ...]:
    return getattr(piece, "parameters", ())


def _reaching_result(
    regions: Sequence[Mapping[str, Any]], result_names: frozenset[str], static: Mapping[str, torch.Tensor]
) -> set[str]:
    """Return the values whose memory the caller may come to hold: results, and all that a result may be a view of."""
    reaching = set(result_names)
    for region in reversed(regions):
        if not reaching & set(_results(region)):
            continue
        reaching.update(name for name in _arguments(region) if name not in static)
    return reaching


def _results(region: Mapping[str, Any]) -> list[str]:
    named = [name.strip() for call in region["calls"] for name in call["results"].split(",")]
    return [*region["results"], *named]


def _arguments(region: Mapping[str, Any]) -> list[str]:
    words = [word.strip(" ()[]") for call in region["calls"] for word in call["arguments"].split(",")]
    return [*region["arguments"], *words]
