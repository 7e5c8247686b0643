"""What a pattern finds: a node whose value one of our operators gives, and the nodes that then go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from piecework.ops.operators import operators
from piecework.passes.reading import Miss, call, form_of, replace, require_private, require_unseen_layout
from piecework.seam.kinds import mutated_arguments, storage_of
from piecework.values.graph import TracedGraph


@dataclass(frozen=True)
class Found:
    """`node` gives what `form` gives for `arguments`; `inside` is what is computed on the way to it.

    `weight_cast` asks for that argument in float32 first: a product with a float32 row takes the weight so.
    """

    node: fx.Node
    form: str
    arguments: tuple[Any, ...]
    inside: tuple[fx.Node, ...]
    weight_cast: int | None = None


Finder = Callable[[fx.Node], Found | None]
"""Looks whether a node ends a pattern; raises Miss where it nearly does."""


def rewrite_found(
    traced: TracedGraph, finders: Sequence[Finder], wanted: frozenset[str]
) -> tuple[list[str], list[str]]:
    """Put a call of a wanted operator wherever a finder finds one; return matches and misses, a line each."""
    matches: list[str] = []
    misses: list[str] = []
    order = _Order(traced.graph)
    for node in list(traced.graph.nodes):
        if node.op not in ("call_function", "call_method") or node not in order:
            continue
        for finder in finders:
            try:
                found = finder(node)
                if found is None or _operator(found) not in wanted:
                    continue
                require_private(found.inside, {*found.inside, found.node})
                order.require_unwritten(found)
                require_unseen_layout(found.node)
            except Miss as miss:
                misses.append(f"{node.name}: {miss}")
                continue
            matches.append(f"{found.form} for {found.node.name}")
            order.forget(_put(traced.graph, found))
            break
    return matches, misses


def _operator(found: Found) -> str:
    known = operators.of_form(found.form)
    return known.name if known is not None else ""


def _put(graph: fx.Graph, found: Found) -> Iterable[fx.Node]:
    """Insert the call and erase what it stands for; return what went."""
    arguments = list(found.arguments)
    with graph.inserting_before(found.node):
        if found.weight_cast is not None:
            arguments[found.weight_cast] = graph.call_method("float", (arguments[found.weight_cast],))
        made = call(graph, found.form, *arguments)
    replace(found.node, made)
    return (found.node, *found.inside)


def rewrite_each(
    traced: TracedGraph, form: str, rule: Callable[[fx.Graph, fx.Node], str]
) -> tuple[list[str], list[str]]:
    """Apply a rule to each call of one operator; return what it says it did, and where it left one alone and why."""
    matches: list[str] = []
    misses: list[str] = []
    for node in [each for each in traced.graph.nodes if form_of(each) == form]:
        try:
            match = rule(traced.graph, node)
        except Miss as miss:
            misses.append(f"{node.name}: {miss}")
        else:
            matches += [match] if match else []
    return matches, misses


class _Order:
    """The order of a graph's nodes, and where memory is written."""

    def __init__(self, graph: fx.Graph) -> None:
        self._place = {node: index for index, node in enumerate(graph.nodes)}
        self._writes = [
            (index, storage_of(written.meta.get("example_value")))
            for node, index in self._place.items()
            for written in mutated_arguments(node)
        ]

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._place

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self._place.pop(node, None)

    def require_unwritten(self, found: Found) -> None:
        """Raise a miss where an argument is written after the pattern read it and before our operator would."""
        read = [argument for argument in found.arguments if isinstance(argument, fx.Node)]
        places = [self._place[node] for node in found.inside if node in self._place]
        last = self._place[found.node]
        first = min(places, default=last)
        memory = {storage_of(node.meta.get("example_value")): node for node in read}
        for index, written in self._writes:
            if first <= index <= last and written in memory:
                raise Miss(f"`{memory[written].name}` is written in place meanwhile")


def nodes_between(last: fx.Node, sources: Sequence[Any]) -> Iterator[fx.Node]:
    """Yield what a node is computed of, down to the sources."""
    seen: set[fx.Node] = set()
    waiting = [last]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in seen and node not in sources and node.op.startswith("call"):
                seen.add(node)
                waiting.append(node)
                yield node
