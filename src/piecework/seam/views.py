"""Views across cuts: a piece that writes memory is handed one tensor of it, and takes the other views itself.

A compiler takes two tensors for two pieces of memory. Where a piece writes to one of which another view enters
too, the view is taken anew inside the piece, from the tensor that both are views of.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from piecework.seam.kinds import is_view, mutated_arguments, storage_of


def take_views_inside(graph: fx.Graph, place: dict[fx.Node, int], opaque: Collection[fx.Node]) -> None:
    """Rewrite `graph` so that each stretch which writes memory is handed one tensor of it; `place` gives stretches."""
    writers: dict[int, set[int]] = {}
    for node, here in place.items():
        if node not in opaque:
            for written in mutated_arguments(node):
                writers.setdefault(here, set()).add(storage_of(written.meta.get("example_value")))
    for here, touched in writers.items():
        nodes = [node for node in graph.nodes if place.get(node) == here]
        entering: dict[int, dict[fx.Node, None]] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                memory = storage_of(source.meta.get("example_value"))
                if memory in touched and place.get(source) != here:
                    entering.setdefault(memory, {}).setdefault(source)
        for sources in entering.values():
            if len(sources) > 1:
                _take_inside(graph, nodes, list(sources), place, here)


def _take_inside(
    graph: fx.Graph, nodes: Sequence[fx.Node], sources: Sequence[fx.Node], place: dict[fx.Node, int], here: int
) -> None:
    made: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        """Copy the views that lead from the owner of the memory to `node`; the owner stays what it is."""
        base = base_of(node)
        if base is None or node in made:
            return made.get(node, node)
        inner = copy(base)
        if not is_view(node):
            return inner
        made[node] = graph.node_copy(node, lambda argument: inner if argument is base else argument)
        made[node].meta = dict(node.meta)
        place[made[node]] = here
        return made[node]

    with graph.inserting_before(nodes[0]):
        replaced = {source: copy(source) for source in sources}
    for node in nodes:
        for source, inside in replaced.items():
            if source is not inside:
                node.replace_input_with(source, inside)


def base_of(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory `node` shares as a view of it or after a write to it; None where it is the owner."""
    first = next((argument for argument in node.args if isinstance(argument, fx.Node)), None)
    if node.op == "placeholder" or first is None:
        return None
    if is_view(node):
        shares = memory_of(node) & memory_of(first)
    else:
        shares = memory_of(node) if first in mutated_arguments(node) and memory_of(node) == memory_of(first) else set()
    return first if shares else None


def memory_of(node: fx.Node) -> set[int]:
    """Return what identifies the memory of a node's tensors."""
    value = node.meta.get("example_value")
    return {storage_of(item) for item in (value if isinstance(value, tuple | list) else (value,))} - {0}
