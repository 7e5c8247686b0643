"""Compilers: each turns one piece's text into an artifact for one box of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piecework.compilers.eager import EagerCompiler
from piecework.compilers.inductor import InductorCompiler
from piecework.errors import OptionError
from piecework.values.artifact import Compiler


def select_compiler(name: str | Callable[..., Any] | None) -> Compiler:
    """Return the compiler of a name."""
    if name == "eager":
        return EagerCompiler()
    if name == "inductor":
        return InductorCompiler()
    raise OptionError(f"compiler `{name}` is unknown", hint="known are eager, aot_eager and inductor")
