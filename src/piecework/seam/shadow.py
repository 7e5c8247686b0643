"""Run a traced graph once for its structure, outside any step and without a trace left behind.

Only which output each leaf of the result is matters here, not the values. The body of an opaque operator is not run: it
may look for a step that there is not, or write to what lies outside the graph. Its fake stands in, filled with zeros,
which are as good an index as any. Tensors that the graph itself writes to are copied first: they are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecework.errors import ContractError, StepError
from piecework.seam.kinds import mutated_arguments, operator_name, storage_of
from piecework.values.declaration import registry


class ShadowRun(fx.Interpreter):
    """Run a graph with the fakes of opaque operators, or `with_bodies`, save those that ask for a step."""

    def __init__(self, graph: fx.GraphModule, *, with_bodies: bool) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._with_bodies = with_bodies

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, or an opaque operator's fake."""
        name = operator_name(self.current_node)
        fake = fake_of(name)
        if fake is not None and _is_opaque(name) and not self._with_bodies:
            return _zeros(fake(*args, **kwargs))
        try:
            return super().call_function(target, args, kwargs)
        except StepError:
            if fake is None:
                raise
            return _zeros(fake(*args, **kwargs))

    def run_node(self, node: fx.Node) -> Any:
        """Remember which node runs."""
        self.current_node = node
        return super().run_node(node)


def _is_opaque(name: str) -> bool:
    return registry.get(name.partition(".")[0]) is not None


def _zeros(result: Any) -> Any:
    for tensor in result if isinstance(result, tuple | list) else (result,):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    return result


def fake_of(name: str) -> Callable[..., Any] | None:
    """Return the fake of the operator `ns::op`, where it was registered from Python."""
    from torch._library.simple_registry import singleton

    entry = singleton.find(name.partition(".")[0]) if name else None
    kernel = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    return getattr(kernel, "func", None)


def shadow_run(graph: fx.GraphModule, values: Sequence[Any], runner: type[ShadowRun] = ShadowRun) -> tuple[Any, ...]:
    """Run `graph` on `values` and return its outputs; `values` are as before afterwards."""
    try:
        outputs = runner(graph, with_bodies=False).run(*_own_copies(graph, values))
    except ContractError:
        raise
    except Exception:  # noqa: BLE001  # a fake that needs fake inputs, or an operator that takes no zeros: try the bodies
        outputs = runner(graph, with_bodies=True).run(*_own_copies(graph, values))
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def _own_copies(graph: fx.GraphModule, values: Sequence[Any]) -> list[Any]:
    """Copy what the graph writes to, itself or through a view."""
    written = {storage_of(a.meta.get("example_value")) for node in graph.graph.nodes for a in mutated_arguments(node)}
    places = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    return [
        value.detach().clone() if isinstance(value, torch.Tensor) and storage_of(place) in written - {0} else value
        for place, value in zip(places, values, strict=True)
    ]
