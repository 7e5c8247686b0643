"""Opaque operators inside a graph that Inductor sees whole: side by side where they can be, and their memory their own.

Between the calls of one layer (write keys, attend) the scheduler places kernels that need no result of them; each would
be a cut more. They are moved in front. And the compiler lets kernels write over what it needs no longer: an opaque body
is promised that its arguments hold until the next step, so nothing is to take their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Nodes = list[Any]


def scheduler_pass(operators: frozenset[str]) -> Callable[[Nodes], Nodes]:
    """Return the pass over Inductor's scheduled nodes, after their fusion, that keeps `operators` apart."""

    def run(nodes: Nodes) -> Nodes:
        from torch._inductor.virtualized import V

        opaque = {id(node) for node in nodes if _called(node) in operators}
        if opaque:
            V.graph.never_reuse_buffers.update(_touched(nodes, opaque))
        return _side_by_side(nodes, opaque)

    return run


def _called(node: Any) -> str:
    """Return `ns::op` of the operator that a scheduled node calls, else an empty string."""
    operator: Any = getattr(getattr(node, "node", None), "op_overload", None)
    return f"{operator.namespace}::{operator._opname}" if hasattr(operator, "_opname") else ""


def _touched(nodes: Nodes, opaque: set[int]) -> Iterable[str]:
    """Yield the buffers that opaque calls take, write or give."""
    own = {name for node in nodes if id(node) in opaque for name in node.get_buffer_names()}
    for node in nodes:
        if id(node) in opaque:
            real = node.scheduler.mutation_real_name
            yield from (real.get(dep.name, dep.name) for dep in node.read_writes.reads)
            yield from node.node.get_mutation_names()
            yield from node.get_buffer_names()
        elif _is_item(node) and any(dep.name in own for dep in node.read_writes.reads):
            yield from node.get_buffer_names()


def _is_item(node: Any) -> bool:
    """Tell whether a node takes one result of a call that has several."""
    return type(getattr(node, "node", None)).__name__ == "MultiOutput"


def _side_by_side(nodes: Nodes, opaque: set[int]) -> Nodes:
    """Move in front of an opaque call what the next one needs, where that needs nothing of the first."""
    left, ordered = list(nodes), []
    while left:
        node = left.pop(0)
        if id(node) not in opaque:
            ordered.append(node)
            continue
        group, names = [node], set(node.get_operation_names())
        while (found := _next(left, opaque, names)) is not None:
            before, inside, left = found
            ordered += before
            group += inside
            names.update(name for each in inside for name in each.get_operation_names())
        ordered += group
    return ordered


def _next(left: Nodes, opaque: set[int], names: set[str]) -> tuple[Nodes, Nodes, Nodes] | None:
    """Return what goes in front of a group, what joins it, and what is left; None where it ends here."""
    index = next((index for index, node in enumerate(left) if id(node) in opaque), None)
    if index is None:
        return None
    call = left[index]
    needed = [node for node in left[:index] if call.ancestors & node.get_operation_names()]
    items = [node for node in needed if _is_item(node) and node.ancestors & names]
    before = [node for node in needed if node not in items]
    if any(node.ancestors & names for node in before):
        return None
    rest = [node for node in left[:index] if node not in needed]
    return before, [*items, call], [*rest, *left[index + 1 :]]
