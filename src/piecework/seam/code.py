"""Code of a loaded artifact, bound to the weights of each site that uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from piecework.errors import BindError
from piecework.seam.arena import StaticCode, split_static
from piecework.seam.cut_text import TextRegion, cut_text
from piecework.seam.promises import is_custom_name
from piecework.seam.watched import held

Piece = Callable[..., tuple[Any, ...]]
_SplitKey = tuple[tuple[str, ...], frozenset[int], tuple[str, ...]]
_MOST_SIZES = 32  # for which one piece keeps memory


@dataclass(frozen=True)
class StaticPiece:
    """A callable for one size, and those of its outputs that are the same tensors at every call, by position."""

    call: Piece
    outputs: Mapping[int, Any]


class LoadedCode:
    """Code of one artifact; `bind` makes the callable of one site.

    `call` is the code that runs on every step, `prepare` what runs once per site on its weights. Weights and prepared
    views are the callable's globals, so that a call passes symbols and activations alone.
    """

    def __init__(
        self, call: CodeType, names: Mapping[str, Any], weights: Sequence[str], prepare: Any = None, text: str = "",
        *, source: Callable[[], str] | None = None, opaque: Mapping[str, str] | None = None, is_watched: bool = False,
    ) -> None:  # fmt: skip
        self._call = call
        self._names = dict(names)
        self._weights = tuple(weights)
        self._prepare = prepare
        self._text = text
        self._source = source or (lambda: text)
        self._splits: dict[_SplitKey, StaticCode | None] = {}
        self._inside: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._opaque = dict(opaque or {})
        self._called = {} if is_watched else custom_calls(self._names) | self._opaque
        self._held = {name: held(operator, self._names[name]) for name, operator in self._called.items()}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what a call passes: symbols, then activations."""
        return self._call.co_varnames[: self._call.co_argcount]

    def bind(self, weights: Sequence[Any]) -> Piece:
        """Return a callable of (symbols…, activations…) that uses `weights`, in the text's order."""
        return FunctionType(self._call, self._globals_for(weights), "piece")

    def with_bodies(self, bodies: Mapping[str, Any]) -> LoadedCode:
        """Return code that calls bodies in the places of operators, by `ns::op`; others stay as they are."""
        called = calls_of(self._names, bodies)
        names = self._names | {name: bodies[operator] for name, operator in called.items()}
        return self._with(names, called)

    def watching(self, watch: Callable[[str, Any], Any]) -> LoadedCode | None:
        """Return code whose calls of operators that are not torch's own are what `watch(name, body)` makes of them.

        None where it makes no such call.
        """
        if not self._called:
            return None
        names = self._names | {name: watch(operator, self._names[name]) for name, operator in self._called.items()}
        return self._with(names, self._opaque, is_watched=True)

    def _with(self, names: Mapping[str, Any], opaque: Mapping[str, str], *, is_watched: bool = False) -> LoadedCode:
        return LoadedCode(
            self._call, names, self._weights, self._prepare, self._text,
            source=self._source, opaque=opaque, is_watched=is_watched,
        )  # fmt: skip

    def regions(self) -> tuple[TextRegion, ...]:
        """Cut the code at the operators whose bodies it was given."""
        return cut_text(self._source(), self._opaque)

    def bind_static(
        self,
        weights: Sequence[Any],
        sizes: Mapping[str, int],
        *,
        fresh: Collection[int],
        given: Mapping[str, Any] | None = None,
    ) -> StaticPiece | None:
        """Return a callable like `bind`'s for these `sizes` alone, which allocates next to nothing; None if it cannot.

        Outputs at the positions in `fresh` are new at every call; the others lie in memory of this site and hold until
        its next call. `given` are activations that will be the same tensors at every call, by parameter name: their
        views are made now. One call at a time: the sites of a piece share what stays inside it.
        """
        given = given or {}
        split = self._split((tuple(sizes), frozenset(fresh), tuple(given)))
        if split is None:
            return None
        names = self._globals_for(weights) | dict(sizes) | dict(given)
        names |= self._inside_for(split, sizes)
        with torch.no_grad():
            exec(split.once, names)
            outputs = {i: eval(text, names) for i, text in enumerate(split.outputs) if text}
        exec(split.hot, names)
        return StaticPiece(names["call"], outputs)

    def _split(self, key: _SplitKey) -> StaticCode | None:
        with self._lock:
            if key not in self._splits:
                self._splits[key] = split_static(self._text, *key) if self._text else None
            return self._splits[key]

    def _inside_for(self, split: StaticCode, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the buffers that stay inside the piece at these sizes, the same for all its sites."""
        key = (split.fresh, *sizes.items())
        with self._lock:
            if key not in self._inside:
                while len(self._inside) >= _MOST_SIZES:
                    del self._inside[next(iter(self._inside))]
                names = self._names | dict(sizes)
                before = set(names)
                exec(split.inside, names)
                self._inside[key] = {name: value for name, value in names.items() if name not in before}
            return self._inside[key]

    def _globals_for(self, weights: Sequence[Any]) -> dict[str, Any]:
        if len(weights) != len(self._weights):
            raise BindError(f"a piece takes {len(self._weights)} weights, `{len(weights)}` were given")
        names = self._names | self._held | dict(zip(self._weights, weights, strict=True))
        device = next((w.device for w in weights if w.device.type == "cuda"), None)
        if device is not None:
            names["device_index"] = device.index
        if self._prepare is not None:
            with torch.no_grad():
                names |= self._prepare(*weights)
        return names


def calls_of(names: Mapping[str, Any], operators: Collection[str]) -> dict[str, str]:
    """Return which of a text's globals are one of the operators `ns::op`."""
    return {name: operator for name, operator in _operators_in(names) if operator in operators}


def custom_calls(names: Mapping[str, Any]) -> dict[str, str]:
    """Return which of a text's globals are operators that are not torch's own, as `ns::op`."""
    return {name: operator for name, operator in _operators_in(names) if is_custom_name(operator)}


def _operators_in(names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in names.items():
        if isinstance(value, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
            whole = value._qualified_op_name if isinstance(value, torch._ops.OpOverloadPacket) else value._name
            yield name, whole.partition(".")[0]


class FunctionCode:
    """A piece that a given function runs: torch's own `CompiledArtifact`, or what a compiler of the user's made.

    The function takes symbols, activations and weights, in that order; a `_boxed_call` takes them as one list.
    """

    def __init__(self, function: Callable[..., Any], weight_count: int) -> None:
        self._function = function
        self._weight_count = weight_count

    def bind(self, weights: Sequence[Any]) -> Piece:
        """Return a callable of (symbols…, activations…) that uses `weights`, in the text's order."""
        if len(weights) != self._weight_count:
            raise BindError(f"a piece takes {self._weight_count} weights, `{len(weights)}` were given")
        function, bound = self._function, tuple(weights)
        if getattr(function, "_boxed_call", False):
            return lambda *args: tuple(function([*args, *bound]))
        return lambda *args: tuple(function(*args, *bound))

    def with_bodies(self, bodies: Mapping[str, Any]) -> FunctionCode:
        """Return the piece as it is: what a function calls inside cannot be told."""
        return self

    def regions(self) -> tuple[TextRegion, ...]:
        """Say that there is no text to cut."""
        return ()

    def bind_static(
        self,
        weights: Sequence[Any],
        sizes: Mapping[str, int],
        *,
        fresh: Collection[int],
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Say that this piece has no such callable."""
