"""Turn what Dynamo raises into errors of ours, with the user's line and a hint."""

from __future__ import annotations

import re

from piecework.errors import GuardError, TraceError

_FAILED = re.compile(r"""got \w*(?:Error|Exception)\((?:"|')(.*?)(?:"|')\)""", re.DOTALL)
_WHAT = re.compile(r"Developer debug context: (?:builtin |call_function )?([^\n\[]{1,80})")
_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Torch's own files, Python's, and what Python holds frozen: a line there is not one to change.
_FOREIGN = re.compile(r"site-packages/torch/|lib/python[\d.]+/(?!site-packages/)|^<frozen ")

_CACHED = re.compile(r'functools\.py", line \d+, in __get__\n +with self\.lock')

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


def explain(error: Exception) -> TraceError | GuardError:
    """Turn Dynamo's error into ours, with the user's last line and a hint."""
    text = str(error)
    frames = [frame for frame in _USER_FRAME.findall(text) if not _FOREIGN.search(frame[0])]
    place = f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    failed = _FAILED.search(text)
    if (what := _WHAT.search(text)) is not None and failed is None:
        first = f"{first} (`{what[1].strip()}`)"
    if failed is not None:
        first = failed[1]
    if _CACHED.search(text):
        first = "a `functools.cached_property` is asked for the first time"
    facts = {"file": frames[-1][0] if frames else "", "line": int(frames[-1][1]) if frames else 0, "report": text}
    if "ConstraintViolation" in type(error).__name__:
        return GuardError(
            f"a dimension declared dynamic is fixed by the model{' at ' + place if place else ''}: {_reason(text)}",
            hint="leave it out of `dynamic`, or change the line so that every size is possible",
            facts=facts,
        )
    is_unsupported = type(error).__name__ in ("Unsupported", "UserError") and "Observed exception" not in first
    advice = "rewrite the line as tensor operations, or put it into an opaque operator"
    if failed is not None or not is_unsupported:
        facts["fails"] = True
        if type(error).__name__ == "InternalTorchDynamoError":
            advice = "rewrite the line in plain numbers (`int(value)`) and tensors, or put it into an opaque operator"
            return TraceError(
                f"torch's tracer fails{' at ' + place if place else ''}: {first}", hint=advice, facts=facts
            )
        hint = "call the model uncompiled with inputs of these sizes to see it fail; mend it, or bound the dimension"
        return TraceError(f"forward fails{' at ' + place if place else ''}: {first}", hint=hint, facts=facts)
    hint = next((hint for words, hint in _HINTS if re.search(words, text)), advice)
    return TraceError(
        f"the model does not trace to one full graph{' at ' + place if place else ''}: {first}", hint=hint, facts=facts
    )


def _reason(text: str) -> str:
    lines = [line.strip(" -") for line in text.splitlines() if line.strip().startswith("-")]
    return lines[0] if lines else text.splitlines()[0]
