"""The commands that serve a model: serve and prewarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

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
    flag,
)

if TYPE_CHECKING:
    from piecework.cli.serving import Startup

SERVER_GROUP = Group.create_ordered("Server")
ENGINE_GROUP = Group.create_ordered("Engine")
PREWARM_GROUP = Group.create_ordered("Prewarm")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Where the server listens, whom it answers, and its limits."""

    host: Annotated[str, flag(SERVER_GROUP, "Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, flag(SERVER_GROUP, "Port to listen at; 0 takes a free one.")] = 8000
    open_port: Annotated[
        str, flag(SERVER_GROUP, "When the port opens: at the start, for probes, or with the weights.", metavar="WHEN")
    ] = "start"
    api_key: Annotated[
        list[str] | None,
        flag(SERVER_GROUP, "A key that requests need; give it again for more.", metavar="KEY", consume_multiple=False),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        flag(SERVER_GROUP, "A name for `model`; give it again for more.", metavar="NAME", consume_multiple=False),
    ] = None
    chat_template: Annotated[
        Path | None, flag(SERVER_GROUP, "A chat template in place of the model's own.", metavar="FILE")
    ] = None
    max_requests: Annotated[
        int, flag(SERVER_GROUP, "Answers under way at most; the next gets 429.", metavar="N")
    ] = 1024
    max_choices: Annotated[int, flag(SERVER_GROUP, "Answers of one request at most.", metavar="N")] = 64
    max_body_bytes: Annotated[int, flag(SERVER_GROUP, "Longest body of a request.", metavar="N")] = 4 << 20
    body_timeout_s: Annotated[float, flag(SERVER_GROUP, "Time that a body may take to come.", metavar="S")] = 30.0
    write_timeout_s: Annotated[
        float, flag(SERVER_GROUP, "Time that a client may take to read a piece.", metavar="S")
    ] = 60.0
    drain_timeout_s: Annotated[
        float, flag(SERVER_GROUP, "Time that open answers have after SIGTERM.", metavar="S")
    ] = 30.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """How the engine serves."""

    max_num_seqs: Annotated[int, flag(ENGINE_GROUP, "Answers computed at a time; others wait.", metavar="N")] = 64
    max_model_len: Annotated[
        int, flag(ENGINE_GROUP, "Longest prompt with its answer; 0: the model's own limit.", metavar="N")
    ] = 0
    block_size: Annotated[int, flag(ENGINE_GROUP, "Tokens of a page of the cache.", metavar="N")] = 16
    num_pages: Annotated[int, flag(ENGINE_GROUP, "Pages of the cache; 0: what the memory allows.", metavar="N")] = 0
    gpu_memory_utilization: Annotated[
        float, flag(ENGINE_GROUP, "Share of the device's memory to use; 0: 0.9 of a GPU, 0.4 of RAM.", metavar="X")
    ] = 0.0
    prefix_caching: Annotated[
        bool, Parameter(help="Share the pages of equal beginnings.", group=ENGINE_GROUP)
    ] = True
    wait_for: Annotated[
        str, flag(ENGINE_GROUP, "now, compiled or captured: what is there before the first answer.", metavar="TIER")
    ] = "now"
    rank_timeout_s: Annotated[
        float, flag(ENGINE_GROUP, "Silence after which a rank takes the others for gone.", metavar="S")
    ] = 300.0
    compile_nice: Annotated[
        int, flag(ENGINE_GROUP, "How far the compile process stands back, 0 to 19.", metavar="N")
    ] = 19
    step_ahead: Annotated[
        str,
        flag(ENGINE_GROUP, "Launch steps before the last one's tokens are read: auto (GPU), on, off.", metavar="WHEN"),
    ] = "auto"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PrewarmFlags:
    """What is run before requests are taken."""

    manifest: Annotated[
        Path | None,
        flag(PREWARM_GROUP, "Run the steps of this file before serving, and add what compiles later.", metavar="FILE"),
    ] = None
    sweep: Annotated[
        str | None, flag(PREWARM_GROUP, "Run these sizes before serving, as sizes=1,16,64-66.", metavar="SIZES")
    ] = None


SERVER_DEFAULTS = ServerFlags()
ENGINE_DEFAULTS = EngineFlags()
PREWARM_DEFAULTS = PrewarmFlags()


def serve(
    model: Model,
    /,
    *,
    serve_once: Annotated[
        str | None,
        flag(PREWARM_GROUP, "Answer this prompt as the server would, list what it compiled, and exit.", metavar="TEXT"),
    ] = None,
    server_flags: ServerFlags = SERVER_DEFAULTS,
    engine_flags: EngineFlags = ENGINE_DEFAULTS,
    prewarm_flags: PrewarmFlags = PREWARM_DEFAULTS,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> int:
    """Serve a model over HTTP as OpenAI's API: at once by eager code, faster as compiled tiers come in.

    With `-tp N` under `torchrun --nproc-per-node=N`, N processes share the model, and the first of them answers.
    """
    from piecework.cli.once import answer_once
    from piecework.cli.serving import run_server

    def once(url: str, startup: Startup) -> int:
        return answer_once(url, startup, str(serve_once), server_flags.api_key, output.json)

    when_ready: Callable[[str, Any], int] | None = once if serve_once is not None else None
    flags = (server_flags, engine_flags, prewarm_flags, model_flags, compile_flags, store_flags)
    return run_server(model, flags, when_ready)


def prewarm(
    model: Model,
    /,
    *,
    engine_flags: EngineFlags = ENGINE_DEFAULTS,
    prewarm_flags: PrewarmFlags = PREWARM_DEFAULTS,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> int:
    """Run the steps of a manifest, or of a sweep, so that what they compile is there for the next start."""
    from piecework.cli.serving import run_prewarm
    from piecework.errors import OptionError

    if prewarm_flags.manifest is None and prewarm_flags.sweep is None:
        raise OptionError("there is nothing to run", hint="give `--manifest FILE`, `--sweep sizes=1,16,64`, or both")
    flags = (SERVER_DEFAULTS, engine_flags, prewarm_flags, model_flags, compile_flags, store_flags)
    return run_prewarm(model, flags, output.json)
