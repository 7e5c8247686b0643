"""Say what a compiler failed at: its nested exceptions as one error with a line, a hint and the range."""

from __future__ import annotations

from collections.abc import Iterator

from piecework.errors import CompileError, CompileForbidden, PassError, PieceworkError
from piecework.values.shapes import Box, format_box


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def compile_error(error: BaseException, box: Box) -> PieceworkError:
    """Say what failed for which range, in one line, and what to do about it; an error of a pass is its own."""
    causes = list(_chain(error))
    forbidden = next((cause for cause in causes if isinstance(cause, CompileForbidden | PassError)), None)
    if forbidden is not None:
        return forbidden
    names = {type(cause).__name__ for cause in causes}
    hint = "compile with `compiler=\"eager\"` to run this piece without Inductor"
    if "InvalidCxxCompiler" in names:
        hint = "Inductor builds CPU kernels with a C++ compiler and none is found: install g++, or set CXX"
    elif any(isinstance(cause, OSError) and "failed to map segment" in str(cause) for cause in causes):
        hint = "the temporary folder is mounted `noexec`: set TMPDIR to a folder that allows running code"
    return CompileError(
        f"the compiler failed for range `{format_box(box)}`: `{_reason(causes)}`",
        hint=hint,
        facts={"box": format_box(box), "error": str(error)},
    )


def _reason(causes: list[BaseException]) -> str:
    """Say in one line what went wrong: the compiler's own error line, else the innermost exception's."""
    cause = next((c for c in reversed(causes) if type(c).__name__ != "CalledProcessError"), causes[0])
    lines = str(cause).strip().splitlines() or [""]
    line = next((text for text in lines if "error: " in text), lines[0])
    return f"{type(cause).__name__}: {line.strip()[:300]}"
