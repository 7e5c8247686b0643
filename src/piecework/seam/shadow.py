"""Run a traced graph once for its structure, outside any step.

A body that finds its cache in the step context cannot run at the trace: there is no step. Such an operator's fake
stands in for it; the values do not matter here, only which output each leaf of the result is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from piecework.errors import StepError
from piecework.seam.kinds import operator_name


class ShadowRun(fx.Interpreter):
    """Run a graph; an operator that asks for a step is run as its fake."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator, or its fake where it has to do with a step."""
        try:
            return super().call_function(target, args, kwargs)
        except StepError:
            fake = fake_of(operator_name(self.current_node))
            if fake is None:
                raise
            return fake(*args, **kwargs)

    def run_node(self, node: fx.Node) -> Any:
        """Remember which node runs."""
        self.current_node = node
        return super().run_node(node)


def fake_of(name: str) -> Callable[..., Any] | None:
    """Return the fake of the operator `ns::op`, where it was registered from Python."""
    from torch._library.simple_registry import singleton

    entry = singleton.find(name.partition(".")[0]) if name else None
    kernel = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    return getattr(kernel, "func", None)


def shadow_run(graph: fx.GraphModule, values: Sequence[Any]) -> tuple[Any, ...]:
    """Run `graph` on `values` and return its outputs."""
    outputs = ShadowRun(graph, garbage_collect_values=True).run(*values)
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


