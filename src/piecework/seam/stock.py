"""Plain torch.compile, as it comes: torch keeps its guards and compiles again when one fails; that is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecework.errors import OptionError
from piecework.events import Observer, Recompiled


def compile_stock(model: torch.nn.Module, observer: Observer, backend: str = "inductor") -> Callable[..., Any]:
    """Return `torch.compile(model)`; each compile after the first call has ended is a `Recompiled` event."""
    import torch._dynamo

    compile_graph: Any = torch._dynamo.lookup_backend(backend)
    calls = 0

    def counting(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if calls:
            sizes = ", ".join(str(list(value.shape)) for value in inputs if isinstance(value, torch.Tensor))[:200]
            observer(Recompiled(reason=f"a guard failed at call {calls + 1}; inputs of sizes {sizes}"))
        return compile_graph(graph, inputs)  # type: ignore[no-any-return]

    compiled = torch.compile(model, backend=counting)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        with torch.no_grad():
            result = compiled(*args, **kwargs)
        calls += 1
        return result

    return call


def options_of_mode(mode: str) -> dict[str, Any]:
    """Return the settings that a mode of `torch.compile` stands for; one that captures graphs itself is refused."""
    from torch._inductor import list_mode_options

    modes: dict[str, dict[str, Any]] = {
        name: dict(options)
        for name, options in list_mode_options().items()
        if not options.get("triton.cudagraphs")
    }
    if mode not in modes:
        raise OptionError(
            f"`{mode}` is no mode to compile what is captured in", hint=f"known are {', '.join(sorted(modes))}"
        )
    return modes[mode]
