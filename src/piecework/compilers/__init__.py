"""Compilers: each turns one piece's text into an artifact for one box of sizes."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from piecework.compilers.aot_eager import AotEagerCompiler
from piecework.compilers.eager import EagerCompiler
from piecework.compilers.function import CallableCompiler
from piecework.compilers.inductor import InductorCompiler
from piecework.errors import OptionError
from piecework.values.artifact import Compiler
from piecework.values.rewriting import PieceRewrite

NAMES = ("eager", "aot_eager", "inductor")


def select_compiler(
    name: str | Callable[..., Any] | Compiler | None, rewrite: PieceRewrite | None = None, *, autotune: bool = False
) -> Compiler:
    """Return the compiler of a name, a compiler as it is, or one that calls a function of the user's for each piece.

    `rewrite` are the passes on functional pieces; a compiler that has no functional piece goes without them.
    `autotune` lets Inductor time several kernels while it builds; other compilers have nothing to choose from.
    """
    compiler = _compiler(name, autotune)
    with_passes: Callable[[PieceRewrite], Compiler] | None = getattr(compiler, "with_passes", None)
    return with_passes(rewrite) if rewrite is not None and with_passes is not None else compiler


def _compiler(name: str | Callable[..., Any] | Compiler | None, autotune: bool) -> Compiler:
    if isinstance(name, Compiler) and not isinstance(name, type):
        return name
    if callable(name):
        return CallableCompiler(name)
    if name == "eager":
        return EagerCompiler()
    if name == "aot_eager":
        return AotEagerCompiler()
    if name == "inductor":
        return InductorCompiler(options={"max_autotune": True} if autotune else None)
    near = difflib.get_close_matches(str(name), NAMES, n=1)
    meant = f"did you mean `{near[0]}`? " if near else ""
    raise OptionError(f"compiler `{name}` is unknown", hint=f"{meant}known are {', '.join(NAMES)}, or a function")
