"""The commands that look at a model: explain, dump and check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from piecework.cli.flags import (
    COMPILE_DEFAULTS,
    MODEL_DEFAULTS,
    MODEL_GROUP,
    OUTPUT_DEFAULTS,
    OUTPUT_GROUP,
    STORE_DEFAULTS,
    CompileFlags,
    Model,
    ModelFlags,
    OutputFlags,
    Override,
    StoreFlags,
    flag,
)

if TYPE_CHECKING:
    from piecework.cli.start import Start


def explain(
    model: Model,
    /,
    *,
    options: Annotated[bool, flag(OUTPUT_GROUP, "Each option's value, and where it came from.")] = False,
    guards: Annotated[bool, flag(OUTPUT_GROUP, "What the trace took for granted.")] = False,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Show what is cut where and by whom, which pieces are equal, and what is stored; compile nothing."""
    from piecework.cli.capture import capture_lines
    from piecework.cli.output import print_json
    from piecework.cli.start import starting

    with starting(compile_flags, store_flags) as start:
        chosen = start.settings.as_dict()
        found: dict[str, Any] = {}
        if output.json or not options:
            found = _explain(model, model_flags, start, with_guards=guards)
            found["capture"] = capture_lines(model_flags.device, start.settings.options)
    if output.json:
        print_json({**found, "options": chosen})
        return
    from piecework.diagnostics.explain_text import explain_lines, guard_lines, option_lines

    lines = option_lines(chosen) if options else guard_lines(found) if guards else explain_lines(found)
    print("\n".join(lines))


def _explain(model: str, flags: ModelFlags, start: Start, *, with_guards: bool) -> dict[str, Any]:
    from piecework.diagnostics.explain import EMPTY, explain_guards, explain_record, find_or_plan
    from piecework.options import NONE, STOCK

    if start.settings.options.mode in (NONE, STOCK):
        return {"mode": start.settings.options.mode, **EMPTY}

    key, record, where = find_or_plan(
        model,
        dtype=flags.dtype,
        device=flags.device,
        options=start.settings.options,
        store=start.store,
        observer=start.observer,
        offline=flags.offline,
    )
    found = explain_record(key, record, where, start.store)
    found["misses"] = start.counters.misses
    return {**found, **explain_guards(record, where)} if with_guards else found


def dump(
    model: Model,
    folder: Annotated[Path, Parameter(name="DIR", help="The folder to write.", group=MODEL_GROUP)],
    /,
    *,
    override: Override = None,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Trace the model anew and write every value as text, in order; `--override` reads an edited piece back."""
    from piecework.cli.output import print_json
    from piecework.cli.start import starting

    with starting(compile_flags, store_flags) as start:
        from piecework.diagnostics.dump import dump_folder

        key, record, artifacts = dump_folder(
            model,
            folder,
            override=override,
            dtype=model_flags.dtype,
            device=model_flags.device,
            options=start.settings.options,
            store=start.store,
            observer=start.observer,
            offline=model_flags.offline,
        )
        from piecework.diagnostics.cuts import count_cuts

        found = {
            "folder": str(folder),
            "key": key,
            **count_cuts(record, start.store),
            "compiled": start.counters.compiled,
            "written": {"pieces": len(record.pieces), "artifacts": artifacts},
            "timings": start.counters.timings(),
        }
    if output.json:
        print_json(found)
    else:
        print(f"{folder}: {found['regions']} regions, {len(record.pieces)} pieces, {artifacts} artifacts")


def check(
    model: Model,
    /,
    *,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> int:
    """Take each step of a start and try each operator; say what would fail; exit code 1 if anything would."""
    from piecework.cli.doctor import tell
    from piecework.cli.start import starting

    with starting(compile_flags, store_flags) as start:
        from piecework.diagnostics.check_model import check_model

        findings = list(
            check_model(
                model,
                dtype=model_flags.dtype,
                device=model_flags.device,
                options=start.settings.options,
                store=start.store,
                offline=model_flags.offline,
            )
        )
    return tell(findings, output)
