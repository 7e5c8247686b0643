"""Turn what Dynamo raises into errors of ours, with the user's line and a hint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from piecework.errors import GuardError, TraceError
from piecework.seam.lines import at

_FAILED = re.compile(r"""got \w*(?:Error|Exception)\((?:"|')(.*?)(?:"|')\)""", re.DOTALL)
_WHAT = re.compile(r"Developer debug context: (?:builtin |call_function )?([^\n\[]{1,80})")
_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Torch's own files, Python's, and what Python holds frozen: a line there is not one to change.
_FOREIGN = re.compile(r"site-packages/torch/|lib/python[\d.]+/(?!site-packages/)|^<frozen ")

_RAISED = re.compile(r"raised exception (\w+)\(([\"']?)(.*?)\2\)", re.DOTALL)
_UNKNOWN = re.compile(r"data-dependent expression (.+?) \(unhinted", re.DOTALL)
_SYMBOL = re.compile(r"\bs\d+\b")  # how torch writes a size that varies
_CONSTANT = re.compile(
    r"L\['kwargs'\](\['\w+'\])(\S*)\.size\(\)\[(\d+)\] as dynamic but your code "
    r"specialized it to be a constant \((\d+)\)"
)

_CACHED = re.compile(r'functools\.py", line \d+, in __get__\n +with self\.lock')

# A comparison of sizes is no `bool` to torch's tracer: it takes none as an argument, an index or a method's owner.
_TRUTH = re.compile(r"SymBool")

_HINTS = (
    (
        r"builtin operator `print`",
        "take the print out of forward, or put it under `if not torch.compiler.is_compiling()`",
    ),
    (
        _CACHED,
        "ask for the property once before compiling, so that its value is there, or keep it as a plain attribute",
    ),
    (r"[Dd]ata-dependent", "use torch.where, or make the branch an opaque operator of your own"),
    (r"builtin|C/C\+\+", "use a tensor operation instead, or put the call into an opaque operator"),
    (r"generator", "use a tensor operation instead, or put the call into an opaque operator"),
)


class Declared(Protocol):
    """A dimension that was declared dynamic: `name` at dimension `dim` of the argument that `path` reaches."""

    @property
    def path(self) -> str: ...

    @property
    def dim(self) -> int: ...

    @property
    def name(self) -> str: ...


def explain(error: Exception, declared: Sequence[Declared] = ()) -> TraceError | GuardError:
    """Turn Dynamo's error into ours, with the user's last line and a hint."""
    text = str(error)
    place, facts = _place(text)
    if "ConstraintViolation" in type(error).__name__:
        return _fixed(text, declared)
    if _TRUTH.search(_said(text)):
        return TraceError(
            f"a condition on a size stands where torch's tracer takes a plain value{place}",
            hint="write `True if … else False`, or `1 if … else 0`, in its place, or branch on it: `if …:`",
            facts=facts,
        )  # fmt: skip
    failed = _FAILED.search(text) or _RAISED.search(text)
    first = _first(text, error, declared)
    is_unsupported = type(error).__name__ in ("Unsupported", "UserError") and "Observed exception" not in text
    advice = "rewrite the line as tensor operations, or put it into an opaque operator"
    if failed is not None or not is_unsupported:
        facts["fails"] = True
        if type(error).__name__ == "InternalTorchDynamoError":
            advice = "rewrite the line in plain numbers (`int(value)`) and tensors, or put it into an opaque operator"
            return TraceError(f"torch's tracer fails{place}: {first}", hint=advice, facts=facts)
        hint = "call the model uncompiled with inputs of these sizes to see it fail; mend it, or bound the dimension"
        return TraceError(f"forward fails{place}: {first}", hint=hint, facts=facts)
    hint = next((hint for words, hint in _HINTS if re.search(words, text)), advice)
    return TraceError(f"the model does not trace to one full graph{place}: {first}", hint=hint, facts=facts)


def _said(text: str) -> str:
    """Return what torch says, without the user's own lines."""
    return text.partition("from user code:")[0]


def _place(text: str) -> tuple[str, dict[str, Any]]:
    """Return ` at FILE:LINE` of the user's last line, or nothing, and the facts of an error."""
    frames = [frame for frame in _USER_FRAME.findall(text) if not _FOREIGN.search(frame[0])]
    file, line = (frames[-1][0], int(frames[-1][1])) if frames else ("", 0)
    return at((file, line)), {"file": file, "line": line, "report": text}


def _first(text: str, error: Exception, declared: Sequence[Declared]) -> str:
    """Say in one line what stopped the tracer; nothing of what it tells the users of torch.compile to do."""
    if _CACHED.search(text):
        return "a `functools.cached_property` is asked for the first time"
    if (unknown := _UNKNOWN.search(text)) is not None:
        return f"it needs `{unknown[1]}`, a number that is known at run time only"
    if "attempted to jump with" in text:
        return "it branches on the value of a tensor (Data-dependent branching)"
    if (failed := _FAILED.search(text)) is not None:
        first = failed[1]
    elif (raised := _RAISED.search(text)) is not None:
        first = f"{raised[1]}: {raised[3]}" if raised[3] else raised[1]
    else:
        first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        if (what := _WHAT.search(text)) is not None:
            first = f"{first} (`{what[1].strip()}`)"
    names = {each.name for each in declared}
    return _SYMBOL.sub(names.pop(), first) if len(names) == 1 else first


def _fixed(text: str, declared: Sequence[Declared]) -> GuardError:
    """Name the first dimension that the model fixes, as the user declared it, with the line that fixes it."""
    found = _CONSTANT.search(text)
    if found is None:
        place, facts = _place(text)
        return GuardError(
            f"a dimension that is declared dynamic is fixed by the model{place}",
            hint="leave it out of `dynamic`, or change the line so that every size is possible", facts=facts,
        )  # fmt: skip
    path, dim, size = found[1][2:-2] + found[2], int(found[3]), int(found[4])
    place, facts = _place(text[found.end() :].partition("\n  - ")[0])
    name = next((each.name for each in declared if (each.path, each.dim) == (path, dim)), "")
    what = f"dimension `{name}` (`{path}.shape[{dim}]`)" if name else f"dimension `{path}.shape[{dim}]`"
    return GuardError(
        f"{what} is declared dynamic, and the model fixes it to `{size}`{place}",
        hint=f"leave dimension {dim} of `{path}` out of `dynamic`, or change the line so that every size is possible",
        facts={**facts, "report": text, "dimension": name, "argument": path, "size": size},
    )
