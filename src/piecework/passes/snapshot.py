"""What a graph's nodes were before a pass: what it then changed is computed anew, whatever it says of it.

A pass may copy a node's metadata to one that gives something else, or hand a node other arguments in place. Neither is
believed: values of new nodes are forgotten, those of others are as they were, and what differs is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from piecework.seam.kinds import mutated_arguments, storage_of

_VALUES = ("example_value", "spec", "val")
_KEPT = ("defines", "unbacked_bindings", "number")  # what data decides was named by the trace, and is not drawn again


@dataclass(frozen=True)
class Snapshot:
    """Each call with its target, arguments and values, and for each written memory who touched it, in order."""

    calls: Mapping[fx.Node, tuple[Any, ...]]
    touched: tuple[tuple[tuple[fx.Node, bool], ...], ...]


def snapshot_of(graph: fx.Graph) -> Snapshot:
    """Note what the calls of a graph are."""
    calls = {
        node: (node.target, node.args, dict(node.kwargs), {name: node.meta.get(name) for name in _VALUES})
        for node in graph.nodes
        if node.op.startswith("call")
    }
    memory: dict[int, list[tuple[fx.Node, bool]]] = {
        storage_of(written.meta.get("example_value")): [] for node in calls for written in mutated_arguments(node)
    }
    memory.pop(0, None)
    for node in calls if memory else ():
        written = {storage_of(each.meta.get("example_value")) for each in mutated_arguments(node)}
        for place in {storage_of(each.meta.get("example_value")) for each in node.all_input_nodes}:
            if place in memory:
                memory[place].append((node, place in written))
    return Snapshot(calls, tuple(tuple(each) for each in memory.values()))


def forget_changed(before: Snapshot, graph: fx.Graph) -> set[fx.Node]:
    """Take away what a pass wrote into metadata; return the nodes that call something else than before."""
    changed = set()
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        known = before.calls.get(node)
        if known is None:
            if not any(name in node.meta for name in _KEPT):
                for name in _VALUES:
                    node.meta.pop(name, None)
            continue
        target, args, kwargs, values = known
        node.meta.update({name: value for name, value in values.items() if value is not None})
        if node.target is not target or node.args is not args or _differs(dict(node.kwargs), kwargs):
            changed.add(node)
    return changed


def _differs(kwargs: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return kwargs.keys() != other.keys() or any(kwargs[name] is not other[name] for name in kwargs)


def moved_write(before: Snapshot, graph: fx.Graph) -> str:
    """Say which write stands on the other side of one that touches the same memory, or nothing."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for touches in before.touched:
        left = [(node, writes) for node, writes in touches if node in place]
        for index, (node, writes) in enumerate(left):
            for other, writes_too in left[index + 1 :]:
                if (writes or writes_too) and place[other] < place[node]:
                    return f"`{other.name}` came after `{node.name}`, one of which writes what both touch"
    return ""
