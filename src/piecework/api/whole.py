"""The whole forward compiled for one decode size: what the capture of small sizes may ask of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from piecework.errors import OptionError
from piecework.options import CompileOptions
from piecework.pipeline import Request
from piecework.runtime.program import Program
from piecework.values.phases import WholeForward
from piecework.values.shapes import Range

INDUCTOR = "inductor"


def whole_forward(
    settings: CompileOptions, make_request: Callable[[CompileOptions], Request], start: Callable[[Request], Program]
) -> Callable[[int, str], Program]:
    """Return what compiles a program's whole forward for one size in a mode of the compiler, or finds it in the store.

    Nothing is cut: opaque operators are called inside. Swappable operators take their reference form, which is the
    compiler's to fuse. The artifact is kept under factors of its own.
    """

    def compile_whole(size: int, mode: str) -> Program:
        changed = replace(
            settings, compiler=_compiler(settings.compiler, mode), autotune=False, partition="none",
            custom_ops=("none",), single_sizes=(size,), lazy_sizes=(),
        )  # fmt: skip
        request = make_request(changed.resolve())
        return start(
            replace(request, factors={**request.factors, "whole_forward": str(size)}, ranges=(Range(size, size),))
        )

    return compile_whole


def _compiler(compiler: Any, mode: str) -> Any:
    """Return Inductor in a mode; any other compiler as it is, which knows none."""
    if compiler == INDUCTOR:
        from piecework.compilers.inductor import InductorCompiler
        from piecework.seam.stock import options_of_mode

        return InductorCompiler(options=options_of_mode(mode))
    if mode != WholeForward().compiler_mode:
        raise OptionError(
            f"`whole_forward_mode` is `{mode}`, a mode of Inductor's, and the program was compiled by `{compiler}`",
            hint='leave it out, or compile the program by `compiler="inductor"`',
        )
    return compiler
