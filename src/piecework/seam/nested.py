"""Graphs inside the graph, and nodes that switch a mode: put in line, dropped where they do nothing, or refused."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from piecework.errors import TraceError
from piecework.seam.lines import at, line_of

# Operators that only run the graph they are given: what they are for (saving memory in training) does not arise.
_PLAIN_CALLS = {"tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "invoke_subgraph"}
_GRADIENTS = "_set_grad_enabled"
_ENTER, _EXIT = "_enter_autocast", "_exit_autocast"


def inline_nested(module: fx.GraphModule) -> None:
    """Leave no graph inside the graph: put in line what only runs its body, refuse the rest by name.

    Gradient switches are dropped, for a program runs without gradients; so is autocast that is switched off
    where nothing switched it on.
    """
    graph = module.graph
    while any(_inline(module, node) for node in list(graph.nodes)):
        pass
    _drop_modes(graph)
    for node in graph.nodes:
        if node.op == "call_function" and type(node.target).__module__.startswith("torch._higher_order_ops"):
            raise _refusal(node, f"`torch.{node.target}`")
    for node in list(graph.nodes):
        if node.op == "get_attr":
            if node.users:
                raise _refusal(node, f"`{node.target}`, which is neither an input nor a weight,")
            graph.erase_node(node)


def _inline(module: fx.GraphModule, node: fx.Node) -> bool:
    """Put the body of a call in line; tell whether there was one."""
    if node.op != "call_function" or str(node.target) not in _PLAIN_CALLS:
        return False
    position = next((i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr"), None)
    if position is None:
        return False
    body = module.get_submodule(str(node.args[position].target))  # type: ignore[union-attr]
    given = [arg for arg in node.args[position + 1 :] if not isinstance(arg, str)]
    inner: Any = body.graph
    places = [n for n in inner.nodes if n.op == "placeholder"]
    if len(places) != len(given):
        return False
    with module.graph.inserting_before(node):
        _copy_attributes(module, body, str(node.args[position].target))  # type: ignore[union-attr]
        env: dict[fx.Node, Any] = dict(zip(places, given, strict=True))
        results = module.graph.graph_copy(inner, env)
    items = results if isinstance(results, tuple | list) else (results,)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(items[user.args[1]])  # type: ignore[index]
            module.graph.erase_node(user)
    if node.users:
        raise _refusal(node, f"`torch.{node.target}`")
    module.graph.erase_node(node)
    return True


def _copy_attributes(module: fx.GraphModule, body: Any, prefix: str) -> None:
    for name, child in body.named_children():
        if not hasattr(module, name):
            setattr(module, name, child)
        elif getattr(module, name) is not child:
            fresh = f"{prefix}_{name}"
            setattr(module, fresh, child)
            for node in body.graph.nodes:
                if node.op == "get_attr" and node.target == name:
                    node.target = fresh


def _drop_modes(graph: fx.Graph) -> None:
    enabled: list[fx.Node] = []
    dropped: list[fx.Node] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == _GRADIENTS:
            dropped.append(node)
        elif name == _ENTER:
            is_on = len(node.args) < 3 or node.args[2] is not False
            if is_on or enabled:
                enabled.append(node)
            else:
                dropped.append(node)
        elif name == _EXIT:
            if node.args[0] in dropped:
                dropped.append(node)
            elif node.args[0] in enabled:
                enabled.remove(node.args[0])
    for node in reversed(dropped):
        graph.erase_node(node)


def _refusal(node: fx.Node, what: str) -> TraceError:
    line = line_of(node)
    return TraceError(
        f"the graph holds {what}{at(line)}, which cannot be cut into pieces",
        hint="compute both ways and choose with torch.where, or make it an opaque operator of your own",
        facts={"file": line[0], "line": line[1]},
    )
