"""Evaluate guards: a program whose conditions on sizes are not proven has torch evaluate them before each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from piecework.errors import OptionError
from piecework.pipeline import Request
from piecework.runtime.program import Program
from piecework.values.arguments import bind_arguments
from piecework.values.graph import SymbolSource
from piecework.values.shapes import hull, symbol_ranges

Call = Callable[..., Any]


def evaluate_guards(program: Program, request: Request) -> None:
    """Let every call of a program go through Dynamo first, where the request asks for that.

    The model is traced once more, at each start. Raises OptionError where a dimension is declared `unbacked`.
    """
    if not request.evaluate_guards:
        return
    from piecework.stages.trace import live_guards

    source = request.make_source()
    refuse_unbacked(source.symbols())
    bounds = hull(symbol_ranges(source.symbols(), request.ranges))
    guards = live_guards(source.model, source.example, source.dynamic, device=source.device, bounds=bounds)
    forward = source.model.forward
    names = tuple(inspect.signature(forward).parameters)

    def around(call: Call) -> Call:
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = bind_arguments(forward, {**dict(zip(names, args, strict=False)), **kwargs})
            except OptionError:
                return call(*args, **kwargs)  # which says what is wrong with them
            sizes = guards.sizes(arguments)
            if any(name not in sizes or sizes[name] not in bound for name, bound in bounds.items()):
                return call(*args, **kwargs)
            return guards.call(arguments, lambda: call(*args, **kwargs))

        return evaluated

    program.wrap(around)
    program.evaluates_guards = True


def refuse_unbacked(symbols: Iterable[SymbolSource]) -> None:
    """Raise where a dimension is declared `unbacked`: there would be no guard on it to evaluate."""
    for symbol in symbols:
        if symbol.kind == "unbacked":
            raise OptionError(
                f"`evaluate_guards` has no meaning with dimension `{symbol.name}`, which is declared `unbacked`: "
                "such dimensions add no guards",
                hint="declare it `backed`, or leave `evaluate_guards` out",
                facts={"dimension": symbol.name},
            )


def refuse_direct(options: Mapping[str, Any], what: str) -> None:
    """Raise where a program whose guards have to be evaluated would be called without: by direct dispatch."""
    if options.get("evaluate_guards"):
        raise OptionError(
            f"{what} is called by direct dispatch, which evaluates no guards: `evaluate_guards` has no meaning there",
            hint="compile without `evaluate_guards`, so that guards are proven instead",
        )
