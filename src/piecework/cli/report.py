"""The command `report`: a run as one page, or two runs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from piecework.cli.flags import (
    COMPILE_DEFAULTS,
    MODEL_DEFAULTS,
    MODEL_GROUP,
    OUTPUT_DEFAULTS,
    OUTPUT_GROUP,
    STORE_DEFAULTS,
    CompileFlags,
    ModelFlags,
    OutputFlags,
    StoreFlags,
    flag,
)

if TYPE_CHECKING:
    from piecework.cli.start import Start
    from piecework.diagnostics.run_file import Run
    from piecework.values.view import View

Subject = Annotated[
    str,
    Parameter(
        name="MODEL|RUN", help="A model folder, which is started, or a file that --timeline wrote.", group=MODEL_GROUP
    ),
]
Other = Annotated[
    str | None, Parameter(name="RUN", help="A second one, to set beside the first.", group=MODEL_GROUP)
]


def report(
    subject: Subject,
    other: Other = None,
    /,
    *,
    output_file: Annotated[
        Path, flag(OUTPUT_GROUP, "The page to write.", metavar="FILE", alias="-o")
    ] = Path("report.html"),
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Write a run as one page: where the time went, pieces, code, ranges, guards, artifacts, capture and traffic."""
    from piecework.cli.output import print_json
    from piecework.cli.start import starting
    from piecework.errors import OptionError

    with starting(compile_flags, store_flags) as start:
        from piecework.diagnostics.report.compare import compare
        from piecework.diagnostics.report.render import render, render_comparison

        first = _view(subject, model_flags, start)
        second = _view(other, model_flags, start) if other is not None else None
        page = render(first) if second is None else render_comparison(compare(first, second))
    try:
        output_file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"the page cannot be written to `{output_file}`: {error.strerror}",
            hint="give a file in a folder that exists",
        ) from error
    size_bytes = len(page.encode())
    if output.json:
        print_json({"page": str(output_file), "size_bytes": size_bytes, "misses": len(first.misses)})
    else:
        print(f"{output_file}: {size_bytes:,} bytes, opens in any browser")


def _view(subject: str, flags: ModelFlags, start: Start) -> View:
    from piecework.diagnostics.report.collect import collect

    path = Path(subject)
    if path.is_file():
        from piecework.diagnostics.run_file import read_run

        return collect(read_run(path), start.store)
    return collect(_start(subject, flags, start), start.store)


def _start(model: str, flags: ModelFlags, start: Start) -> Run:
    """Start a model and watch; where it has no weights, fill the store as `build` does."""
    from piecework.diagnostics.timeline import Timeline
    from piecework.events import fan_out

    timeline = Timeline(["piecework", *sys.argv[1:]])
    from piecework.api.folder import build_folder, open_model
    from piecework.api.location import locate
    from piecework.models.weight_files import has_weights

    has = has_weights(locate(model, offline=flags.offline))
    (open_model if has else build_folder)(
        model,
        dtype=flags.dtype,
        device=flags.device,
        options=start.settings.options,
        store=start.store,
        observer=fan_out(start.observer, timeline),
        offline=flags.offline,
    )
    return timeline.run()
