"""What a pass is and what it says of its work: nouns that pipeline, compilers and reports share.

A pass is a function graph -> graph. One on the `graph` takes the whole `TracedGraph` before the split; one on a
`piece` takes a `FunctionalPiece`, inside the compiler, after functionalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from piecework.values.digest import digest_data

GRAPH, PIECE = "graph", "piece"
PLACES = (GRAPH, PIECE)
MOST_MISSES = 16  # a record is read on every start: it keeps so many reasons a pass


@dataclass(frozen=True)
class FunctionalPiece:
    """One piece as a compiler takes it: functional ATen calls, each with its fake value under `meta["val"]`.

    Its inputs are the placeholders in order; inputs that a piece writes to are written by `copy_` at its end.
    """

    graph: fx.Graph


@dataclass(frozen=True)
class Rewritten:
    """What a pass returns: the graph, one line for each match, and one for each place that it left and why."""

    graph: Any
    matches: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphPass:
    """A function graph -> graph with what names it in keys: name, version, and a digest of a user's own source.

    `expects_match` says that its author takes it for an error of the pattern if it matches nothing; an `is_quiet` pass
    is told of only where it has something to say.
    """

    name: str
    version: int
    runs_on: str
    function: Callable[[Any], Rewritten]
    expects_match: bool = False
    digest: str = ""
    is_quiet: bool = False

    def as_factor(self) -> dict[str, Any]:
        """Return what enters keys."""
        own = {"digest": self.digest} if self.digest else {}
        return {"name": self.name, "version": self.version, **own}


@dataclass(frozen=True)
class PassReport:
    """What a pass did with one graph: how often it matched and where, what it left alone and why.

    `note` is empty unless there is something to say: that it matched nothing where it should, or did not run.
    """

    name: str
    version: int
    runs_on: str
    matches: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a record keeps it."""
        return {
            "name": self.name,
            "version": self.version,
            "runs_on": self.runs_on,
            "matches": len(self.matches),
            "places": list(self.matches[:MOST_MISSES]),
            "misses": list(self.misses[:MOST_MISSES]),
            "note": self.note,
        }


@dataclass(frozen=True)
class PassStep:
    """One pass over one graph: the graph's lines before and after, the report, and when it began and ended."""

    report: PassReport
    before: tuple[str, ...]
    after: tuple[str, ...]
    start_ns: int = 0
    end_ns: int = 0


class PieceRewrite(Protocol):
    """Rewrites a functional piece in place; handed to compilers, which put `digest` in their version."""

    @property
    def digest(self) -> str: ...

    def __call__(self, graph: fx.Graph) -> tuple[PassStep, ...]: ...


def factors_of(passes: tuple[GraphPass, ...]) -> list[Mapping[str, Any]]:
    """Return the factors of passes in their order, which matters."""
    return [one.as_factor() for one in passes]


def digest_of(passes: tuple[GraphPass, ...]) -> str:
    """Return one short digest of passes in their order; empty where there is none."""
    return digest_data(factors_of(passes))[:16] if passes else ""
