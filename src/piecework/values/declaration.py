"""What `@compilable` and `split_op` attach to a class or an operator; torch-free."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from piecework.errors import OptionError, SplitError

KINDS = ("backed", "oblivious", "unbacked")
ATTRIBUTE = "__piecework_declaration__"
Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Dim:
    """A dimension that varies: dimensions of one name have one size at every call."""

    name: str
    kind: str = "backed"
    low: int = 1
    high: int = 0

    def __post_init__(self) -> None:
        reserved = self.name in ("torch", "operator", "math") or (self.name[1:].isdigit() and self.name[0] in "psuvwx")
        if not self.name.isidentifier() or keyword.iskeyword(self.name) or self.name.startswith("_") or reserved:
            raise OptionError(f"dimension name `{self.name}` cannot be used", hint="use a plain word such as `tokens`")
        if self.kind not in KINDS:
            raise OptionError(f"dimension kind `{self.kind}` is unknown", hint=f"use one of {', '.join(KINDS)}")


Dynamic = Mapping[str, Any]


@dataclass(frozen=True)
class Declaration:
    """What a compilable class says of itself."""

    dynamic: Dynamic


def compilable(*, dynamic: Dynamic) -> Callable[[Class], Class]:
    """Declare a module class compilable, and which dimensions of forward's arguments vary.

    `dynamic` maps an argument's name to `{dim: name}`; the name says which dimensions have one size. For an
    argument that is a dictionary, list or dataclass, `{dim: name}` holds for every tensor in it, and a nested
    mapping reaches single members.
    """

    def declare(cls: Class) -> Class:
        setattr(cls, ATTRIBUTE, Declaration(dynamic))
        return cls

    return declare


@dataclass(frozen=True)
class SplitOp:
    """An operator declared opaque at its definition: the graph is cut around it."""

    name: str
    module: str
    body: Callable[..., Any] | None = None
    capture: str = "never"
    writes: str = ""
    reads: str = ""
    retains_arguments: bool = False


CAPTURE_SUPPORT = ("never", "one_token_decode", "uniform_decode", "always")


class SplitRegistry:
    """Every operator declared with `split_op`, by qualified name; `freeze` closes it for a trace."""

    def __init__(self) -> None:
        self._ops: dict[str, SplitOp] = {}
        self._traced: set[str] = set()

    def add(self, op: SplitOp) -> None:
        known = self._ops.get(op.name)
        if known is None and op.name in self._traced:
            raise SplitError(
                f"operator `{op.name}` is declared a split point after a graph that calls it was traced",
                hint="declare it where it is defined, before the first compile",
            )
        self._ops[op.name] = op

    def freeze(self, called: set[str]) -> None:
        """Note the operators that a traced graph calls: declaring one of them later is an error."""
        self._traced |= called

    def get(self, name: str) -> SplitOp | None:
        return self._ops.get(name)

    def names(self) -> tuple[str, ...]:
        """Return all declared names in order: import order does not matter."""
        return tuple(sorted(self._ops))


registry = SplitRegistry()


def split_op(
    name: str, *, capture: str = "never", writes: str = "", reads: str = "", retains_arguments: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the operator `ns::op` opaque, at the definition of its body.

    The decorated function is the operator's body: a bound program calls it directly. `capture` says how far
    the body may stand inside a CUDA graph: `never`, `one_token_decode`, `uniform_decode` or `always`.
    `writes` and `reads` name hidden state (a KV cache): a reader must take a result of a writer as an
    argument, so that their order stands in the graph.

    What a body is handed holds until the next step. One that keeps an argument beyond its step (in a list, for another
    thread) says `retains_arguments=True`; it is then handed tensors of its own.
    """
    if "::" not in name:
        raise OptionError(f"operator name `{name}` is not qualified", hint="write it as `namespace::name`")
    if capture not in CAPTURE_SUPPORT:
        raise OptionError(f"capture support `{capture}` is unknown", hint=f"use one of {', '.join(CAPTURE_SUPPORT)}")

    def declare(body: Callable[..., Any]) -> Callable[..., Any]:
        registry.add(SplitOp(name, body.__module__, body, capture, writes, reads, retains_arguments))
        return body

    return declare
