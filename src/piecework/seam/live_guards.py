"""Shape guards that are evaluated and not proven: before each call, Dynamo itself says whether its graph holds for it.

For debugging alone. Guards on values are left out, nothing is traced again, and a guard that fails is told with the
sizes and the user's line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from piecework.errors import GuardError
from piecework.seam.dynamo import Capture, DimMark, capture
from piecework.seam.shape_guards import place_of
from piecework.values.graph import ShapeGuard, SymbolSource
from piecework.values.predicate import NUMBERS, evaluate, names_in
from piecework.values.tree import leaves

_FAILED = re.compile(r"^ *- \d+/\d+: (.*)$", re.MULTILINE)
_ROOT = "kwargs"  # the name under which the traced entry knows the arguments


class _Reached(Exception):
    """Raised in place of the graph: every guard held."""


class LiveGuards:
    """One trace whose shape guards stay alive; the graph itself is never run."""

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Mapping[str, Any],
        marks: Sequence[DimMark],
        symbols: Sequence[SymbolSource],
    ) -> None:
        self._symbols = symbols
        self.captured: Capture
        self.captured, _ = capture(model, (), arguments, marks, keeps_shape_guards=True)
        self.captured.instead = _reach
        self.conditions: Sequence[ShapeGuard] = ()  # over the declared names, evaluated after torch's own guards
        self._traced = tuple(arguments)

    def call(self, arguments: Mapping[str, Any], serve: Callable[[], Any]) -> Any:
        """Return what `serve` gives, once torch found every shape guard to hold for the arguments.

        Raises GuardError with the first that does not. Arguments in which a guarded size cannot be found go to `serve`
        too, which knows what is wrong with them; so do sizes outside the declared ones.
        """
        given = {name: arguments[name] for name in self._traced if name in arguments}
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                self.captured.run((), given)
        except _Reached:
            self._check_conditions(self.sizes(arguments))
            return serve()
        except (KeyError, IndexError, AttributeError, TypeError):
            return serve()
        except RuntimeError as error:
            if "fail_on_recompile" not in str(error):
                raise
            failed = _FAILED.search(str(error))
            raise self._failure(failed[1] if failed else "", self.sizes(arguments)) from None
        raise AssertionError("a graph that is never run gave a result")

    def sizes(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes of the arguments by their declared names, as far as they are there."""
        tensors = {path: leaf for name, value in arguments.items() for path, leaf in leaves(value, name)}
        found: dict[str, int] = {}
        for symbol in self._symbols:
            path, dim = symbol.places[0]
            if isinstance(leaf := tensors.get(path), torch.Tensor) and dim < leaf.dim():
                found[symbol.name] = leaf.shape[dim]
        return found

    def _check_conditions(self, sizes: Mapping[str, int]) -> None:
        for guard in self.conditions:
            if set(names_in(guard.expression)) <= set(sizes) and not evaluate(guard.expression, sizes, NUMBERS):
                raise _refusal(guard.expression, guard.line, sizes)

    def _failure(self, text: str, sizes: Mapping[str, int]) -> GuardError:
        if not text:
            return GuardError(
                "torch forgot the trace whose guards are evaluated",
                hint="`torch._dynamo.reset()` and its like drop it: compile again after them",
            )
        expression, _, where = text.partition("  # ")
        files = {code.co_filename for code in self.captured.code}
        line = place_of(where, files) if where else ""
        for symbol in self._symbols:
            for path, dim in symbol.places:
                expression = expression.replace(f"{_source(path)}.size()[{dim}]", symbol.name)
        return _refusal(expression, line, sizes)


def _refusal(expression: str, line: str, sizes: Mapping[str, int]) -> GuardError:
    values = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return GuardError(
        f"the graph is right only where `{expression}`{f' (at {line})' if line else ''}; this call has {values}",
        hint="without `evaluate_guards` such a size is traced on its own, or refused before anything is compiled",
        facts={"expression": expression, "values": dict(sizes), "line": line},
    )


def _reach() -> Any:
    raise _Reached


def _source(path: str) -> str:
    """Return how Dynamo writes the argument that a path leads to."""
    name = re.match(r"\w+", path)
    assert name is not None
    return f"{_ROOT}['{name[0]}']{path[name.end() :]}"
