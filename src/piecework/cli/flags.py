"""Flags that several commands share; what is not given is `None`, so that each value's origin can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

MODEL_GROUP = Group.create_ordered("Model")
COMPILE_GROUP = Group.create_ordered("Compilation")
STORE_GROUP = Group.create_ordered("Store")
CAPTURE_GROUP = Group.create_ordered("Capture")
WATCH_GROUP = Group.create_ordered("Observation")
OUTPUT_GROUP = Group.create_ordered("Output")


def flag(group: Group, text: str, **more: object) -> Parameter:
    """Describe a flag that is shown in a group of the help."""
    return Parameter(help=text, group=group, negative="", show_default=False, **more)  # type: ignore[arg-type]


Model = Annotated[
    str, Parameter(name="MODEL", help="A folder in Hugging Face format, or a hub name.", group=MODEL_GROUP)
]


Override = Annotated[
    Path | None,
    flag(COMPILE_GROUP, "Compile the edited pieces of a folder that `dump` wrote, in their places.", metavar="DIR"),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """How a model is read."""

    dtype: Annotated[str, flag(MODEL_GROUP, "auto, float32, bfloat16, float16 or float64; auto: the folder's own.")] = (
        "auto"
    )
    device: Annotated[str, flag(MODEL_GROUP, "cpu (the default), cuda or cuda:1.")] = "cpu"
    offline: Annotated[bool, flag(MODEL_GROUP, "Ask no network, also where MODEL is a hub name.")] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompileFlags:
    """How a model is compiled."""

    optimization_level: Annotated[
        int | None, flag(COMPILE_GROUP, "0 to 3, also written -O0 to -O3: a table of defaults.", metavar="LEVEL")
    ] = None
    mode: Annotated[
        str | None, flag(COMPILE_GROUP, "none, stock, trace_once or piecewise; or 0 to 3.", metavar="MODE")
    ] = None
    compiler: Annotated[str | None, flag(COMPILE_GROUP, "eager, aot_eager or inductor.", metavar="COMPILER")] = None
    enforce_eager: Annotated[bool | None, flag(COMPILE_GROUP, "Neither compile nor capture; the same as -O0.")] = None
    max_num_batched_tokens: Annotated[
        int | None, flag(COMPILE_GROUP, "Largest number of tokens that a program serves.", metavar="N")
    ] = None
    ranges: Annotated[
        str | None, flag(COMPILE_GROUP, "Token counts that share an artifact, as 1-64,65-8192.", metavar="RANGES")
    ] = None
    single_sizes: Annotated[
        str | None, flag(COMPILE_GROUP, "Sizes with an artifact of their own, as 8,16.", metavar="SIZES")
    ] = None
    autotune: Annotated[
        bool | None, flag(COMPILE_GROUP, "Let the compiler time several kernels while it builds, and keep the fastest.")
    ] = None
    passes: Annotated[
        str | None,
        flag(COMPILE_GROUP, "The whole list of passes over the graph, as no_ops,…; empty: none.", metavar="PASSES"),
    ] = None
    custom_ops: Annotated[
        str | None,
        flag(COMPILE_GROUP, "Operators of the registry: all or none, then +op,-op,…", metavar="OPS"),
    ] = None
    split_ops: Annotated[
        str | None, flag(COMPILE_GROUP, "Operators to cut at besides those declared, as ns::op,ns::op.", metavar="OPS")
    ] = None
    split_ops_only: Annotated[
        str | None, flag(COMPILE_GROUP, "The whole list of operators to cut at; empty: no cut.", metavar="OPS")
    ] = None
    partition: Annotated[
        str | None,
        flag(
            COMPILE_GROUP,
            "Where the graph is cut: fx, before compiling; inductor, in what was compiled whole; none, nowhere.",
            metavar="WHERE",
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int | None,
        flag(COMPILE_GROUP, "How many processes share the model, also -tp N; torchrun starts them.", metavar="N"),
    ] = None
    compilation_config: Annotated[
        list[str] | None,
        flag(
            COMPILE_GROUP,
            "Options as JSON, also written -cc; -cc.mode=0 gives one of them.",
            metavar="JSON",
            consume_multiple=False,
        ),
    ] = None
    compilation_pair: Annotated[list[str] | None, Parameter(show=False, negative="", consume_multiple=False)] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreFlags:
    """Where artifacts are kept."""

    store: Annotated[
        str | None, flag(STORE_GROUP, "A folder, a URL (s3://…), memory; else PIECEWORK_STORE, else the cache folder.")
    ] = None
    store_read_only: Annotated[bool | None, flag(STORE_GROUP, "Write nothing to the store.")] = None
    store_write_only: Annotated[bool | None, flag(STORE_GROUP, "Read nothing that was in the store before.")] = None
    strict: Annotated[bool | None, flag(STORE_GROUP, "A damaged entry is an error instead of a miss.")] = None
    trust: Annotated[str | None, flag(STORE_GROUP, "Whose artifacts are loaded: own, signed or any.")] = None
    trusted_keys: Annotated[str | None, flag(STORE_GROUP, "A file of public keys, one a line.", metavar="FILE")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CaptureFlags:
    """What is captured as graphs; what cannot be honoured is refused."""

    cudagraph_mode: Annotated[
        str | None,
        flag(CAPTURE_GROUP, "NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.", metavar="MODE"),
    ] = None
    cudagraph_capture_sizes: Annotated[
        str | None, flag(CAPTURE_GROUP, "The sizes to capture, as 1,2,4.", metavar="SIZES")
    ] = None
    cuda_graph_backend_decode: Annotated[
        str | None, flag(CAPTURE_GROUP, "disabled, full, breakable or tc_piecewise.", metavar="BACKEND")
    ] = None
    cuda_graph_backend_prefill: Annotated[
        str | None, flag(CAPTURE_GROUP, "The same, for steps that are not decode.", metavar="BACKEND")
    ] = None
    disable_cuda_graph: Annotated[bool | None, flag(CAPTURE_GROUP, "Capture nothing.")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """What is left of a run, for those who look at it."""

    timeline: Annotated[
        Path | None, flag(WATCH_GROUP, "Write the run to a file that Perfetto and `report` open.", metavar="FILE")
    ] = None
    events: Annotated[
        Path | None, flag(WATCH_GROUP, "Append each event to a file as it happens, as a line of JSON.", metavar="FILE")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """What is printed."""

    json: Annotated[bool, flag(OUTPUT_GROUP, "One JSON document on standard output, and nothing else there.")] = False
    debug: Annotated[bool | None, flag(OUTPUT_GROUP, "Errors with their traceback.")] = None


# What a command gets where none of the flags is given.
MODEL_DEFAULTS = ModelFlags()
COMPILE_DEFAULTS = CompileFlags()
STORE_DEFAULTS = StoreFlags()
CAPTURE_DEFAULTS = CaptureFlags()
WATCH_DEFAULTS = WatchFlags()
OUTPUT_DEFAULTS = OutputFlags()
