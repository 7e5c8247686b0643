"""What a compiler makes of one piece for one box of sizes; torch-free.

An artifact is what runs: source text, compiled kernels as bytes, the guards it assumes and the facts
of its calling convention. It is never a pickle that drags the compiler in (kind `torch` is the one
exception, the loud fall-back for output that our own loader does not know).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from piecework.values.shapes import Box

TEXT = "text"
INDUCTOR = "inductor"
TORCH = "torch"
OBJECT = "object"  # a callable of this process, made by the user's own compile function; never in a store on disk

LIBRARY = "kernels"  # under which an artifact has the C++ kernels of its own; any other library's name is its kernel's


@dataclass(frozen=True)
class Artifact:
    """One piece, compiled for one box."""

    kind: str
    text: str
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode()) + sum(map(len, self.kernels.values()))


class LoadedPiece(Protocol):
    """Code of one artifact, ready to be bound to the weights of each site that uses the piece."""

    def bind(self, weights: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """Return a callable of (symbols…, activations…) in the piece text's order that returns a tuple."""


def keeping_apart(compiler: Compiler, operators: Sequence[str]) -> Compiler:
    """Return the compiler for pieces that hold opaque operators, which are to be promised what a cut promises them."""
    change: Callable[[Sequence[str]], Compiler] | None = getattr(compiler, "keeping_apart", None)
    return change(operators) if operators and change is not None else compiler


def preparing(compiler: Compiler, observer: Any, *, when: bool) -> AbstractContextManager[None]:
    """Let a compiler begin, beside what the block does, what it will need for the pieces that come of it.

    `when` says whether there will be any: of a request that was built before most artifacts are there.
    """
    begin: Callable[[Any], AbstractContextManager[None]] | None = getattr(compiler, "preparing", None)
    return begin(observer) if when and begin is not None else nullcontext()


@runtime_checkable
class Compiler(Protocol):
    """Something that compiles one piece for one box; `name` and `version` enter the artifact's key."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def compile(self, text: str, box: Box) -> Artifact: ...
