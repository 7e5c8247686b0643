"""`piecework bench`: how long a start, a step or a token takes, for two settings or two commits in one run."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from piecework.cli.flags import (
    COMPILE_DEFAULTS,
    MODEL_DEFAULTS,
    OUTPUT_DEFAULTS,
    WATCH_GROUP,
    CompileFlags,
    Model,
    ModelFlags,
    OutputFlags,
    StoreFlags,
    flag,
)

if TYPE_CHECKING:
    from piecework.diagnostics.bench import Side


def bench(
    what: Annotated[Literal["startup", "dispatch", "decode"], Parameter(help="What is timed.", group=WATCH_GROUP)],
    model: Model,
    /,
    *,
    versus: Annotated[
        str | None,
        flag(WATCH_GROUP, 'Options of a second side, over those of the first: {"mode": "none"}.', metavar="JSON"),
    ] = None,
    versus_commit: Annotated[
        str | None, flag(WATCH_GROUP, "A second side: another commit of the checkout.", metavar="COMMIT")
    ] = None,
    cold: Annotated[bool, flag(WATCH_GROUP, "Each start from an empty store; else from a filled one.")] = False,
    repetitions: Annotated[int, flag(WATCH_GROUP, "Processes a side; 3 without it.", metavar="N")] = 3,
    warmups: Annotated[int, flag(WATCH_GROUP, "Calls thrown away in each process; 1.", metavar="N")] = 1,
    calls: Annotated[int, flag(WATCH_GROUP, "Timed calls, or blocks of them, in each process; 3.", metavar="N")] = 3,
    tokens: Annotated[int, flag(WATCH_GROUP, "Tokens of an answer, for decode; 32.", metavar="N")] = 32,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Time starts, steps or tokens; two settings or two commits are read in turn, in one run."""
    from piecework.cli.output import print_json
    from piecework.diagnostics.bench import Measure, Side, compare, source_of
    from piecework.errors import OptionError

    for name, value, least in (("repetitions", repetitions, 1), ("warmups", warmups, 0), ("calls", calls, 1)):
        if value < least:
            raise OptionError(f"`--{name}` is `{value}`", hint=f"give a whole number from {least} up")
    if what == "decode" and tokens < 2:
        raise OptionError(f"`--tokens` is `{tokens}`", hint="give a whole number from 2 up: the first is not timed")
    own = _given(compile_flags)
    measure = Measure(
        what, model, model_flags.dtype, model_flags.device, repetitions=repetitions, warmups=warmups, calls=calls,
        tokens=tokens, is_cold=cold,
    )  # fmt: skip
    with ExitStack() as stack:
        sides: list[Side] = [Side("this", own)]
        if versus is not None:
            sides.append(Side("versus", own | _given(CompileFlags(compilation_config=[versus]))))
        if versus_commit is not None:
            sides.append(Side(versus_commit, own, stack.enter_context(source_of(versus_commit))))
        found = compare(measure, sides, lambda line: print(line, file=sys.stderr))
    if output.json:
        print_json(found)
        return
    print(f"{found['question']}: {found['how']}")
    for name, row in found["table"].items():
        print(f"{name}: median {row['median']:g} {found['unit']}, best {row['best']:g}")
    for name, ratio in found["ratios"].items():
        print(f"{name}: {ratio['median']:.3f} of medians, {ratio['best']:.3f} of best readings")


def _given(flags: CompileFlags) -> dict[str, Any]:
    """Return the options that flags give, in any of the ways to give one."""
    from piecework.cli.settings import DERIVED, gather
    from piecework.env import Environment

    settings = gather(flags, StoreFlags(), Environment.read())
    return {
        each.name: getattr(settings.options, each.name)
        for each in fields(settings.options)
        if not settings.origins[each.name].startswith(DERIVED)
    }
