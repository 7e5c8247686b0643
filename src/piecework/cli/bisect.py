"""The command that finds where a program first differs from its model: bisect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from piecework.cli.flags import (
    COMPILE_DEFAULTS,
    MODEL_DEFAULTS,
    OUTPUT_DEFAULTS,
    STORE_DEFAULTS,
    CompileFlags,
    Model,
    ModelFlags,
    OutputFlags,
    StoreFlags,
)


def bisect(
    model: Model,
    /,
    *,
    prompt: Annotated[str | None, Parameter(help="Text to run on.", metavar="TEXT")] = None,
    prompt_ids: Annotated[
        str | None, Parameter(help="Token ids to run on, as 1,2,3, where there is no tokenizer.", metavar="IDS")
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Tokens to compare after the prompt.", metavar="N")] = 8,
    folder: Annotated[
        Path | None, Parameter(help="A folder for what reproduces a piece that is wrong.", metavar="DIR")
    ] = None,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> int:
    """Run a model and each stage of its program on one prompt, and name the first tensor that differs.

    Exit code 1 if one does.
    """
    from piecework.cli.config import parse_numbers
    from piecework.cli.output import print_json
    from piecework.cli.start import starting
    from piecework.errors import OptionError

    if (prompt is None) == (prompt_ids is None):
        raise OptionError("`bisect` takes one prompt", hint="give `--prompt TEXT` or `--prompt-ids 1,2,3`")
    if max_tokens < 1:
        raise OptionError(f"`--max-tokens` is `{max_tokens}`", hint="give a whole number from 1 up")
    given: Any = prompt if prompt is not None else parse_numbers(str(prompt_ids), "--prompt-ids")
    with starting(compile_flags, store_flags) as start:
        from piecework.diagnostics.bisect_folder import bisect_folder, finding_lines

        found = bisect_folder(
            model,
            given,
            dtype=model_flags.dtype,
            device=model_flags.device,
            options=start.settings.options,
            store=start.store,
            observer=start.observer,
            offline=model_flags.offline,
            max_tokens=max_tokens,
            folder=folder,
        )
    if output.json:
        print_json(found.as_dict())
    else:
        print("\n".join(finding_lines(found)))
    return 0 if found.finding.is_equal else 1
