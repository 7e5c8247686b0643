"""The command `traffic`: a model of the bytes that a step, or one operator, moves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from piecework.cli.flags import (
    COMPILE_DEFAULTS,
    MODEL_DEFAULTS,
    MODEL_GROUP,
    OUTPUT_DEFAULTS,
    STORE_DEFAULTS,
    CompileFlags,
    ModelFlags,
    OutputFlags,
    StoreFlags,
    flag,
)

if TYPE_CHECKING:
    from piecework.cli.start import Start
    from piecework.diagnostics.traffic.measured import Measured
    from piecework.diagnostics.traffic.model import Traffic
    from piecework.diagnostics.traffic.operators import OperatorCall
    from piecework.diagnostics.traffic.step import StepSizes

TRAFFIC_GROUP = Group.create_ordered("Traffic")
Subject = Annotated[
    str,
    Parameter(
        name="MODEL|OPERATOR",
        help="A model folder, an operator of the registry such as fused_add_rms_norm, or a function as module:name.",
        group=MODEL_GROUP,
    ),
]


def traffic(
    subject: Subject,
    /,
    *,
    tokens: Annotated[int, flag(TRAFFIC_GROUP, "Tokens in the step.", metavar="N")] = 1,
    sequences: Annotated[
        int | None, flag(TRAFFIC_GROUP, "Sequences that they belong to; one for each token.", metavar="N")
    ] = None,
    context: Annotated[
        int | None, flag(TRAFFIC_GROUP, "Tokens of each sequence, these included.", metavar="N")
    ] = None,
    bandwidth: Annotated[
        str | None, flag(TRAFFIC_GROUP, "Bytes as time: 3.35TB/s, or measured by a copy.", metavar="RATE")
    ] = None,
    hidden: Annotated[int, flag(TRAFFIC_GROUP, "Width of an operator's rows.", metavar="N")] = 4096,
    shape: Annotated[
        list[str] | None, flag(TRAFFIC_GROUP, "Shape of an operator's argument, as cos=T,1,64.", metavar="NAME=SIZES")
    ] = None,
    value: Annotated[
        list[str] | None, flag(TRAFFIC_GROUP, "Value of an operator's argument, as epsilon=1e-5.", metavar="NAME=VALUE")
    ] = None,
    sites: Annotated[int, flag(TRAFFIC_GROUP, "Places at which the operator stands in a step.", metavar="N")] = 1,
    profile: Annotated[
        bool, flag(TRAFFIC_GROUP, "Run the operator on the GPU too, and count its kernels.")
    ] = False,
    beside: Annotated[
        str | None, flag(TRAFFIC_GROUP, "A model folder whose weights the operator is set beside.", metavar="MODEL")
    ] = None,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Show the bytes that a step moves, operator by operator and fused: a model that explains, no measurement."""
    from piecework.cli.start import starting

    with starting(compile_flags, store_flags) as start:
        from piecework.diagnostics.traffic.bandwidth import read_bandwidth
        from piecework.diagnostics.traffic.operators import OperatorCall, is_operator, read_shape, read_value
        from piecework.diagnostics.traffic.step import operator_traffic, step_sizes

        step = step_sizes(tokens, sequences, context)
        rate = read_bandwidth(bandwidth, model_flags.device) if bandwidth else 0.0
        neighbour: Traffic | None = None
        measured: Measured | None = None
        if is_operator(subject):
            call = OperatorCall(
                hidden, "bfloat16" if model_flags.dtype == "auto" else model_flags.dtype, model_flags.device,
                dict(map(read_shape, shape or [])), dict(map(read_value, value or [])),
            )  # fmt: skip
            found = operator_traffic(subject, call, tokens, sites)
            neighbour = _of_model(beside, step, model_flags, start) if beside else None
            measured = _measure(subject, call, tokens) if profile else None
        else:
            _refuse_of_operator({"--shape": shape, "--value": value, "--beside": beside, "--profile": profile})
            found = _of_model(subject, step, model_flags, start)
    _print(subject, found, neighbour, measured, rate, as_json=output.json)


def _print(
    subject: str, found: Traffic, beside: Traffic | None, measured: Measured | None, rate: float, *, as_json: bool
) -> None:
    from piecework.cli.output import print_json
    from piecework.diagnostics.traffic.text import measured_lines, traffic_lines

    if as_json:
        extra: dict[str, object] = {"beside": beside.as_dict()} if beside is not None else {}
        if measured is not None:
            extra["measured"] = asdict(measured)
        print_json({"subject": subject, **found.as_dict(), "bandwidth": rate, **extra})
        return
    print("\n".join(traffic_lines(found, title=subject, beside=beside, bandwidth=rate)))
    if measured is not None:
        print("\n".join(measured_lines(measured)))


def _measure(subject: str, call: OperatorCall, tokens: int) -> Measured:
    from piecework.diagnostics.traffic.measured import measure_operator

    return measure_operator(subject, call, tokens)


def _refuse_of_operator(given: dict[str, object]) -> None:
    from piecework.errors import OptionError

    for name, value in given.items():
        if value:
            raise OptionError(f"`{name}` is for an operator, and a model is asked for", hint="leave it out")


def _of_model(model: str, step: StepSizes, flags: ModelFlags, start: Start) -> Traffic:
    from piecework.diagnostics.traffic.step import model_traffic

    return model_traffic(
        model,
        step,
        dtype=flags.dtype,
        device=flags.device,
        options=start.settings.options,
        store=start.store,
        observer=start.observer,
        offline=flags.offline,
    )
