"""A compiler of the user's own: any function of a graph and example inputs that returns a callable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from piecework.errors import CompileError
from piecework.seam.objects import keep
from piecework.seam.rebuild import rebuild_piece
from piecework.values.artifact import Artifact
from piecework.values.shapes import Box, format_box

CompileFunction = Callable[[Any, Sequence[Any]], Callable[..., Any]]
_numbers = itertools.count()


class CallableCompiler:
    """Call `function(graph_module, fake_inputs)` for each piece; what it returns runs in this process alone.

    Its artifacts name an object of this process, so that they belong in a `MemoryStore`; the version never repeats, so
    that no other process, and no other compiler of this one, takes them for its own.
    """

    name = "callable"

    def __init__(self, function: CompileFunction) -> None:
        self._function = function
        self._number = next(_numbers)

    @property
    def version(self) -> str:
        """What beside piece and range decides the artifact: the function itself, as an object of this process."""
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return f"format=1 function={name} object={id(self._function):x}.{self._number}"

    def compile(self, text: str, box: Box) -> Artifact:
        """Hand one piece to the function, as a graph module with fake inputs in the order of its parameters."""
        piece = rebuild_piece(text, box)
        try:
            compiled = self._function(piece.module, list(piece.inputs))
        except Exception as error:
            raise CompileError(
                f"the compile function failed for range `{format_box(box)}`: `{type(error).__name__}: {error}`",
                hint="the function is given a torch.fx.GraphModule and fake inputs, and returns a callable of them",
                facts={"box": format_box(box), "error": str(error)},
            ) from error
        if not callable(compiled):
            raise CompileError(f"the compile function returned a `{type(compiled).__name__}`, which cannot be called")
        return keep(compiled, piece.call_names, piece.weight_names)
