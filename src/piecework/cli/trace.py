"""`piecework trace`: everything for a bug report, in one folder, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from piecework.cli.flags import (
    COMPILE_DEFAULTS,
    MODEL_DEFAULTS,
    MODEL_GROUP,
    OUTPUT_DEFAULTS,
    STORE_GROUP,
    CompileFlags,
    Model,
    ModelFlags,
    OutputFlags,
    flag,
)


def trace(
    model: Model,
    folder: Annotated[Path, Parameter(name="DIR", help="The folder to write; it must be empty.", group=MODEL_GROUP)],
    /,
    *,
    store: Annotated[
        str, flag(STORE_GROUP, "A store to look in; without one the build starts with an empty one.")
    ] = "memory",
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> int:
    """Build the model under every trace there is, and collect all of it for a bug report, without secrets."""
    from piecework.cli.output import print_json
    from piecework.diagnostics.bug_report import collect_bug_report
    from piecework.env import all_variables

    flags = ["--store", store, *given_flags(model_flags), *given_flags(compile_flags)]
    found = collect_bug_report(model, folder, flags, all_variables())
    if output.json:
        print_json({"folder": str(folder), "files": list(found.files), "exit_code": found.exit_code})
    else:
        print("\n".join(str(folder / name) for name in found.files))
        ended = "was built" if not found.exit_code else f"failed with exit code {found.exit_code}: see log.txt"
        print(f"the model {ended}; secrets, names and absolute paths are taken out, look before you send it")
    return 0


def given_flags(flags: ModelFlags | CompileFlags) -> list[str]:
    """Return flags as they were typed, for a process of its own; those that were not given are left out."""
    words: list[str] = []
    for name, value in vars(flags).items():
        word = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                words.append(word)
            elif each is not None and each is not False:
                words.append(f"{word}={each}")
    return words
