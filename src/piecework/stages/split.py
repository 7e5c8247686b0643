"""Split: a linear scan over the graph, cut around opaque operators.

Whole numbers that follow from sizes belong to no stretch: each region computes them anew, so no size
crosses a cut. An item of a tuple goes where the tuple is made, so no tuple crosses either.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from piecework.errors import ContractError, OptionError, SplitError
from piecework.seam.collectives import WAIT
from piecework.seam.contracts import faults_of_registration, unused_calls
from piecework.seam.kinds import is_state, is_trivial, names_operator, operator_name
from piecework.seam.names import registered_operators
from piecework.seam.views import take_views_inside
from piecework.seam.waits import parted
from piecework.values.declaration import registry
from piecework.values.graph import BY_COMPILER, FX, INLINE, OPAQUE, PIECE, SplitGraph, Stretch, TracedGraph
from piecework.values.signature import TensorSpec


def resolve_split_ops(split_ops: Sequence[str], split_ops_only: Sequence[str] | None) -> frozenset[str]:
    """Return the operators to cut at: those declared plus `split_ops`, or `split_ops_only` alone."""
    asked = split_ops if split_ops_only is None else split_ops_only
    declared = registry.names()
    for name in asked:
        if name not in declared and not _is_registered(name):
            near = difflib.get_close_matches(name, {*declared, *registered_operators()}, n=1, cutoff=0.7)
            raise OptionError(
                f"split operator `{name}` is not registered",
                hint=f"did you mean `{near[0]}`?"
                if near
                else "import the module that registers it, and write it as `namespace::name`",
            )
    return frozenset(asked if split_ops_only is not None else (*declared, *split_ops))


def _is_registered(name: str) -> bool:
    space, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), op, None) if space and op else None
    return packet is not None and (not overload or overload in packet.overloads())


def split(
    traced: TracedGraph, split_ops: frozenset[str], *, merge_consecutive: bool = True, partition: str = FX
) -> SplitGraph:
    """Cut the graph at `split_ops`; consecutive opaque calls stay together unless told otherwise.

    Where `partition` says so it stays whole, with these operators inside: it is cut when it is compiled, or never.
    """
    graph = traced.graph
    calls = [node for node in graph.nodes if node.op.startswith("call") and not node.meta.get("number")]
    called = {name for node in calls if (name := operator_name(node)) and not name.startswith("aten::")}
    registry.freeze({name.partition(".")[0] for name in called})
    opaque = {node: name for node in calls if (name := names_operator(node, split_ops))}
    _check_registration(opaque.values())
    _check_order(calls)
    names = tuple(sorted(set(opaque.values())))
    place = _places(calls, opaque, merge_consecutive=merge_consecutive)
    if partition in (FX, BY_COMPILER):
        _check_modes(calls, place)
        _check_waits(place)
    if partition != FX:
        opaque, place = {}, dict.fromkeys(calls, 0)
    _check_effects(graph, opaque, names)
    take_views_inside(graph, place, opaque)
    groups: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in place:
            groups.setdefault(place[node], []).append(node)
    ordered = [groups[index] for index in sorted(groups)]
    inputs = _inputs(ordered, opaque)
    used = {source for one in inputs for source in one} | set(_sources(graph.output_node()))
    stretches = tuple(
        _stretch(_needed(nodes, used), tuple(one), used, nodes[0] in opaque)
        for nodes, one in zip(ordered, inputs, strict=True)
    )
    return SplitGraph(traced, stretches, names, tuple(sorted(called)), partition)


def _places(
    calls: Sequence[fx.Node], opaque: Collection[fx.Node], *, merge_consecutive: bool
) -> dict[fx.Node, int]:
    """Return for each call the number of the region that it falls into."""
    place: dict[fx.Node, int] = {}
    region, was_opaque = 0, False
    for node in calls:
        first = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(first, fx.Node) and first in place and _is_tuple(first):
            place[node] = place[first]
            continue
        is_opaque = node in opaque
        if is_opaque != was_opaque or (is_opaque and not merge_consecutive):
            region += 1
        place[node], was_opaque = region, is_opaque
    return place


def _inputs(ordered: Sequence[Sequence[fx.Node]], opaque: Collection[fx.Node]) -> list[dict[fx.Node, None]]:
    """Return what enters each stretch: values from outside, and for a piece the data-dependent sizes of those."""
    defines = {node.meta["defines"]: node for nodes in ordered for node in nodes if "defines" in node.meta}
    found: list[dict[fx.Node, None]] = []
    for nodes in ordered:
        own = set(nodes)
        inputs: dict[fx.Node, None] = {}
        for node in nodes:
            for source in _sources(node):
                if source not in own:
                    inputs.setdefault(source)
        if defines and nodes[0] not in opaque:
            for source in list(inputs):
                for name in data_dependent_names(source.meta.get("spec")):
                    if name in defines and defines[name] not in own:
                        inputs.setdefault(defines[name])
        found.append(inputs)
    return found


def _needed(nodes: Sequence[fx.Node], used: Collection[fx.Node]) -> Sequence[fx.Node]:
    """Leave out the reading of sizes that nothing asks for."""
    return [node for node in nodes if node.users or node in used or "defines" not in node.meta] or nodes


def data_dependent_names(spec: object) -> Iterable[str]:
    """Yield the names of sizes in a spec that are known at run time only."""
    sizes = (*spec.shape, *(spec.stride or ())) if isinstance(spec, TensorSpec) else ()
    for size in sizes:
        if isinstance(size, str):
            yield from re.findall(r"\bu\d+\b", size)


def _check_registration(names: Iterable[str]) -> None:
    for name in dict.fromkeys(name.partition(".")[0] for name in names):
        for argument, fault in faults_of_registration(name):
            raise SplitError(
                f"operator `{name}` {fault}",
                hint="give the function registered with `register_fake` the schema's arguments and their defaults",
                facts={"operator": name, "argument": argument},
            )


def _check_effects(graph: fx.Graph, opaque: Collection[fx.Node], split_ops: Collection[str]) -> None:
    """Refuse a call that is made for an effect which nothing declares: a compiler removes it."""
    for name in unused_calls(graph, opaque):
        if not opaque and name in {each.partition(".")[0] for each in split_ops}:
            raise ContractError(
                f"operator `{name}` is called for nothing: no result of it is used and it declares no effect, so that "
                "a compiler which sees the whole graph removes the call",
                hint='cut before compiling, partition="fx", or mark what the operator writes, as in `Tensor(a!) log`',
                facts={"operator": name, "argument": "result"},
            )
        raise ContractError(
            f"operator `{name}` is called for nothing: no result of it is used and it declares no effect, so that a "
            "compiler removes the call",
            hint="declare it a split point (`split_op`, `split_ops`), which is never removed, or mark what it writes, "
            "as in `Tensor(a!) log`; if it has no effect, take the call out",
            facts={"operator": name, "argument": "result"},
        )


def _check_modes(calls: Sequence[fx.Node], place: dict[fx.Node, int]) -> None:
    """Refuse a span of autocast with an opaque call inside: its pieces would run without it."""
    for node in calls:
        opened = node.args[0] if is_state(node) and node.args else None
        if isinstance(opened, fx.Node) and place[opened] != place[node]:
            raise SplitError(
                "an opaque call stands inside `torch.autocast`, which cannot span a cut",
                hint="close the autocast block before the opaque call and open another one after it",
            )


def _check_waits(place: dict[fx.Node, int]) -> None:
    """Refuse a cut between a collective and its wait: a piece would hand on what is not there yet."""
    for collective, user in parted(place):
        name = operator_name(collective).partition(".")[0]
        raise SplitError(
            f"a cut would part `{name}` from `{user.name}`, which waits for it",
            hint="wait for the collective before the opaque call, or start it after; to cut at the collective itself, "
            f"name `{WAIT}` as a split operator too",
            facts={"operator": name, "wait": user.name},
        )


def _is_tuple(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), tuple | list)


def _stretch(
    nodes: Sequence[fx.Node], inputs: tuple[fx.Node, ...], used: Collection[fx.Node], is_opaque: bool
) -> Stretch:
    outputs = tuple(node for node in nodes if node in used)
    if is_opaque:
        return Stretch(OPAQUE, tuple(nodes), inputs, outputs)
    if crossing := next((node for node in outputs if _is_tuple(node)), None):
        raise SplitError(
            f"the result of `{crossing.target}` is a tuple that crosses a cut as a whole",
            hint="take its items before the opaque call",
        )
    kind = INLINE if all(is_trivial(node) for node in nodes) else PIECE
    return Stretch(kind, tuple(nodes), inputs, outputs)


def _sources(node: fx.Node) -> Iterable[fx.Node]:
    """Yield what a node needs from outside, numbers resolved to the symbols they follow from."""
    for source in node.all_input_nodes:
        if source.meta.get("number"):
            yield from _sources(source)
        else:
            yield source


def _check_order(calls: Sequence[fx.Node]) -> None:
    """Refuse a reader of hidden state that takes no result of a writer: their order would not be in the graph."""
    for node in calls:
        name = operator_name(node).partition(".")[0]
        declared = registry.get(name) if name else None
        if declared is None or not declared.reads:
            continue
        sources = [registry.get(operator_name(source).partition(".")[0]) for source in node.all_input_nodes]
        if not any(source is not None and source.writes == declared.reads for source in sources):
            raise SplitError(
                f"`{name}` reads `{declared.reads}` but takes no result of an operator that writes it",
                hint="pass the writer's token to the reader, so that their order stands in the graph",
            )
