"""What an operator's schema and fake promise, held against what its body does, while a traced graph runs for real.

A graph is cut, ordered and compiled by what schemas and fakes say. An operator that writes what it does not
declare, gives back its argument, or has a fake that describes another result makes programs silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecework.seam.kinds import mutated_arguments, operator_name, storage_of
from piecework.seam.promises import Before, call_body, check_results, expected_of, is_custom_name, refuse_shared
from piecework.seam.shadow import ShadowRun


def calls_operators(graph: fx.Graph) -> bool:
    """Tell whether a graph calls operators that are not torch's own."""
    return any(is_custom(node) for node in graph.nodes)


def is_custom(node: fx.Node) -> bool:
    """Tell whether a node calls an operator that is not torch's own."""
    name = operator_name(node)
    return bool(name) and is_custom_name(name)


class CheckedRun(ShadowRun):
    """Run a graph on real values; hold each call of an operator that is not torch's own to its contract.

    Raises ContractError, naming operator and argument; what was written is put back first.
    """

    def run(self, *values: Any, **given: Any) -> Any:
        """Run on the values of the placeholders; note the sizes that they have."""
        self.sizes: dict[Any, int] = {}
        graph: Any = self.module.graph
        places = graph.find_nodes(op="placeholder")
        for node, value in zip(places, values, strict=True):
            example = node.meta.get("example_value")
            if isinstance(value, int) and isinstance(example, torch.SymInt):
                self.sizes[example.node.expr] = value
        self._is_right_here = _holds_at(self.sizes, places)
        return super().run(*values, **given)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; compare its arguments before and after, and its results with what its fake says."""
        if not is_custom(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        arguments = list(_tensors(n, args, kwargs))
        written = {storage_of(self.env[node]) for node in mutated_arguments(n)}
        before = Before(arguments)
        name = operator_name(n).partition(".")[0]
        result = call_body(name, super().run_node, (n,), {})
        before.refuse_writes(name, written)
        refuse_shared(name, result, arguments)
        check_results(name, result, expected_of(n.meta.get("example_value"), self._size))
        return result

    def _size(self, size: Any) -> int | None:
        """Return a size of the fake at this run's sizes, or None where data decide, or the graph is not for them."""
        if isinstance(size, int):
            return size
        if not self._is_right_here:
            return None
        value = size.node.expr.subs(self.sizes)
        return int(value) if value.is_Integer else None


def _holds_at(sizes: Mapping[Any, int], places: Sequence[fx.Node]) -> bool:
    """Tell whether the trace's conditions hold at sizes: where not, its fakes are not to blame for what they say."""
    values = (node.meta.get("example_value") for node in places)
    environment = next((value.node.shape_env for value in values if isinstance(value, torch.SymInt)), None)
    return environment is None or all(bool(guard.expr.subs(sizes) != False) for guard in environment.guards)  # noqa: E712


def _tensors(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    schema = getattr(node.target, "_schema", None) or _only_schema(node.target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = [*((names[i] if i < len(names) else f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]
    for name, value in given:
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                yield name, item


def _only_schema(packet: Any) -> Any:
    overloads = packet.overloads()
    return getattr(packet, overloads[0])._schema if len(overloads) == 1 else None


def _innermost(function: Any) -> Any:
    """Return the user's function under torch's layers of it."""
    while True:
        held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        inner = held.get("func") or held.get("fn")
        if not callable(inner):
            return function
        function = inner


def faults_of_registration(name: str) -> Iterator[tuple[str, str]]:
    """Yield (argument, what is wrong) of an operator `ns::op` as far as its registration shows it."""
    from torch._library.simple_registry import singleton

    space, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, space), short)
    for overload in packet.overloads():
        qualified = f"{name}.{overload}" if overload != "default" else name
        kernel = getattr(getattr(singleton.find(name), "fake_impl", None), "kernel", None)
        keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
        if kernel is None:
            if not any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key) for key in keys):
                yield "", "has no fake: nothing says what it returns"
            continue
        try:
            fake = inspect.signature(_innermost(kernel.func)).parameters
        except (TypeError, ValueError, AttributeError):
            continue
        takes_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in fake.values())
        for argument in getattr(packet, overload)._schema.arguments if not takes_any else ():
            parameter = fake.get(argument.name)
            if argument.has_default_value() and parameter is not None and parameter.default is parameter.empty:
                yield argument.name, f"has a default for `{argument.name}` that its fake lacks"


def unused_calls(graph: fx.Graph, kept: Collection[fx.Node]) -> Iterator[str]:
    """Yield the operators that are not torch's own and are called in vain: a compiler removes such a call.

    No result of theirs reaches the graph's result, and neither does it a call that declares an effect. `kept` are calls
    that no one removes: opaque ones.
    """
    from torch._library.utils import is_impure

    def declares_effect(node: fx.Node) -> bool:
        target = node.target
        if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
            target = getattr(target, target.overloads()[0])
        is_call = node.op == "call_function"
        return bool(mutated_arguments(node)) or (is_call and is_impure(target, args=node.args, kwargs=node.kwargs))  # type: ignore[arg-type]

    waiting = [node for node in graph.nodes if node.op == "output" or node in kept or declares_effect(node)]
    needed = set(waiting)
    while waiting:
        found = [source for source in waiting.pop().all_input_nodes if source not in needed]
        needed.update(found)
        waiting.extend(found)
    for node in graph.nodes:
        if node not in needed and is_custom(node):
            yield operator_name(node).partition(".")[0]
