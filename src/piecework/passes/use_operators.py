"""Put the chosen implementation in place of each call of our operators.

An operator that is off becomes what its reference computes, in torch's own operations, for the compiler to fuse. One
that is on becomes a call of the implementation, or stays as it is where the reference is all there is. The choice
stands in the graph: nothing is chosen when a program runs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from piecework.ops.choice import Choice
from piecework.ops.operators import Form, operators
from piecework.passes.reading import argument, drop, form_of, spec_of
from piecework.seam.inline import forget_values, inline_call
from piecework.values.graph import TracedGraph
from piecework.values.rewriting import Rewritten

STAYS_ON = "it stays on"


def use_operators(traced: TracedGraph, choices: Mapping[str, Choice]) -> Rewritten:
    """Replace each call of an operator by its implementation, or by what its reference computes."""
    matches: list[str] = []
    fresh: list[fx.Node] = []
    for node in list(traced.graph.nodes):
        known = operators.of_form(form_of(node)) if form_of(node) else None
        if known is None or known.is_opaque:
            continue
        matches.append(f"{node.name}: {_use(node, known.form(form_of(node)), choices[known.name], fresh)}")
    forget_values(fresh)
    matches.sort(key=lambda match: STAYS_ON not in match)  # a record keeps the first ones
    return Rewritten(traced, tuple(matches))


def _use(node: fx.Node, form: Form, choice: Choice, fresh: list[fx.Node]) -> str:
    arguments = {name: argument(node, index, name) for index, name in enumerate(form.arguments)}
    chosen = choice.pick(form.name, arguments)
    if chosen is not None:
        node.target = getattr(torch.ops.piecework, f"{form.name}__{chosen.name}")
        fresh += [node, *_keep_results(node)]
        kept = f"; {STAYS_ON}: {chosen.irreplaceable}" if not choice.is_on else ""
        return f"`{form.name}` by `{chosen.name}`{kept}"
    if choice.is_on:
        return f"`{form.name}` by its reference, as one call"
    fresh += _inline(node, form)
    return f"`{form.name}` as the operations of its reference"


def _keep_results(node: fx.Node) -> list[fx.Node]:
    """Let the graph's own results lie as they did, though an implementation may lay its results out in another way."""
    made = []
    for each in [node, *node.users]:
        spec = spec_of(each)
        if (each is not node and each.target is not operator.getitem) or spec is None or spec.stride is not None:
            continue
        for user in [user for user in each.users if user.op == "output"]:
            with node.graph.inserting_before(user):
                kept = node.graph.call_method("clone", (each,), {"memory_format": torch.contiguous_format})
            user.replace_input_with(each, kept)
            made.append(kept)
    return made


def _inline(node: fx.Node, form: Form) -> list[fx.Node]:
    results, made = inline_call(node, form.reference)
    if not isinstance(results, tuple):
        node.replace_all_uses_with(results)
    else:
        for item in list(node.users):
            assert item.target is operator.getitem
            item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
            node.graph.erase_node(item)
    node.graph.erase_node(node)
    for each in results if isinstance(results, tuple) else ():
        drop(each)
    return made
