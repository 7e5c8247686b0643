"""Behind `serve` and `prewarm`: flags become a plan, and the plan a server."""

from __future__ import annotations

import http.client
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from piecework.cli.flags import CompileFlags, ModelFlags, StoreFlags
from piecework.cli.progress import progress
from piecework.cli.ranks import refuse_sharing
from piecework.cli.settings import Settings, gather, open_store
from piecework.cli.start import checks_for
from piecework.env import Environment
from piecework.errors import EngineError, OptionError
from piecework.events import Observer

if TYPE_CHECKING:
    from piecework.cli.serve import EngineFlags, PrewarmFlags, ServerFlags
    from piecework.engine.loop import Engine
    from piecework.engine.manifest import Specialisation
    from piecework.engine.options import EngineOptions, Progress
    from piecework.engine.prewarm import WatchedRunner
    from piecework.engine.service import Report, Service
    from piecework.engine.shapes import Coverage, StepShape
    from piecework.server.generation import ServedModel
    from piecework.server.template import ChatTemplate

log = logging.getLogger("piecework")
Flags = tuple["ServerFlags", "EngineFlags", "PrewarmFlags", ModelFlags, CompileFlags, StoreFlags]


@dataclass
class Startup:
    """What a start is made of, and what it has found so far."""

    model: str
    settings: Settings
    engine: EngineOptions
    model_flags: ModelFlags
    shapes: tuple[StepShape, ...]
    manifest: Path | None
    coverage: Coverage
    observer: Observer
    misses: list[Specialisation] = field(default_factory=list)
    runner: WatchedRunner | None = None
    refused: tuple[StepShape, ...] = ()

    def make_engine(self, report: Report, hear: Report = lambda progress: None) -> Engine:
        """Open the engine and run what it is to have run; called by the engine's own thread."""

        def told(progress: Progress) -> None:
            report(progress)
            hear(progress)

        from piecework.api.serving import open_engine
        from piecework.engine.prewarm import run_shapes, watch_shapes

        flags = self.model_flags
        engine = open_engine(
            self.model,
            dtype=flags.dtype,
            device=flags.device,
            options=self.settings.options,
            engine=self.engine,
            store=open_store(self.settings, self.observer, checks_for(self.settings)),
            observer=self.observer,
            offline=flags.offline,
            report=told,
        )
        self.runner = watch_shapes(engine, self.coverage)
        self.refused = run_shapes(engine, self.runner, self.shapes, told)
        return engine

    @contextmanager
    def watching(self, hear: Callable[[Specialisation], None]) -> Iterator[None]:
        """Have each compile from now on told and written down."""
        from piecework.engine.prewarm import watch_misses

        def heard(found: Specialisation) -> None:
            self.misses.append(found)
            hear(found)

        with watch_misses(lambda: self.runner, self.manifest, heard):
            yield


@contextmanager
def _starting(model: str, flags: Flags, writes_manifest: bool) -> Iterator[Startup]:
    """Read all flags, so that what is wrong in them is told before anything is loaded."""
    from piecework.diagnostics.counters import Counters
    from piecework.diagnostics.report_lines import ReportLines
    from piecework.engine.manifest import read, shapes_in
    from piecework.engine.shapes import Coverage, parse_sweep
    from piecework.events import fan_out

    _, engine_flags, prewarm_flags, model_flags, compile_flags, store_flags = flags
    settings = gather(compile_flags, store_flags, Environment.read())
    refuse_sharing(settings.options.tensor_parallel_size, "serve` and `piecework prewarm")
    shapes: list[StepShape] = []
    manifest = prewarm_flags.manifest
    if manifest is not None and (manifest.exists() or not writes_manifest):
        shapes += shapes_in(read(manifest))
    if prewarm_flags.sweep is not None:
        shapes += parse_sweep(prewarm_flags.sweep)
    with progress() as draw:
        yield Startup(
            model=model,
            settings=settings,
            engine=_engine_options(engine_flags, compile_flags, settings),
            model_flags=model_flags,
            shapes=tuple(dict.fromkeys(shapes)),
            manifest=manifest if writes_manifest else None,
            coverage=Coverage(),
            observer=fan_out(Counters(), ReportLines(str(settings.store.store)), draw),
        )


def _engine_options(flags: EngineFlags, compile_flags: CompileFlags, settings: Settings) -> EngineOptions:
    from piecework.engine.options import EngineOptions

    return EngineOptions(
        max_num_sequences=flags.max_num_seqs,
        max_num_batched_tokens=settings.options.max_num_batched_tokens,
        max_length=flags.max_model_len,
        page_size=flags.block_size,
        num_pages=flags.num_pages,
        memory_fraction=flags.gpu_memory_utilization,
        share_prefixes=flags.prefix_caching,
        enforce_eager=bool(compile_flags.enforce_eager),
        wait_for=flags.wait_for,
        compile_nice=flags.compile_nice,
    )


def run_server(model: str, flags: Flags, when_ready: Callable[[str, Startup], int] | None) -> int:
    """Serve until the end is asked for, or until `when_ready` has done its work."""
    try:
        from piecework.server.front import Front
        from piecework.server.metrics import Metrics
        from piecework.server.options import ServeOptions
        from piecework.server.readiness import Readiness
        from piecework.server.run import Plan, Stop, serve
        from piecework.server.template import read_template
    except ModuleNotFoundError as error:
        raise OptionError(
            f"`serve` needs the package `{error.name}`", hint="pip install 'piecework[server]'"
        ) from error
    server_flags = flags[0]
    options = ServeOptions(
        host=server_flags.host,
        port=server_flags.port,
        open_port=server_flags.open_port,
        api_keys=tuple(server_flags.api_key or ()),
        served_model_names=tuple(server_flags.served_model_name or (_model_name(model),)),
        max_body_bytes=server_flags.max_body_bytes,
        max_requests=server_flags.max_requests,
        max_choices=server_flags.max_choices,
        body_timeout_s=server_flags.body_timeout_s,
        write_timeout_s=server_flags.write_timeout_s,
        drain_timeout_s=server_flags.drain_timeout_s,
    )
    if server_flags.chat_template is not None:  # told now, not after the weights
        read_template(server_flags.chat_template.parent, server_flags.chat_template)
    stop = Stop()
    with _starting(model, flags, writes_manifest=True) as startup, ExitStack() as stack, stop.on_signals():
        front = Front(options, Readiness(), Metrics(options.served_model_names[0]), coverage=startup.coverage)

        def start_service(hear: Report) -> Service:
            from piecework.engine.service import Service

            return Service(lambda report: startup.make_engine(report, hear)).start()

        def before_ready() -> None:
            startup.coverage.arm()
            stack.enter_context(startup.watching(front.misses.add))

        plan = Plan(
            start_service=start_service,
            describe=lambda service: _describe(cast("Service", service), startup, server_flags.chat_template),
            before_ready=before_ready,
            when_ready=lambda url: when_ready(url, startup) if when_ready is not None else None,
        )
        return serve(front, plan, stop)


def _model_name(model: str) -> str:
    return Path(model).resolve().name if Path(model).exists() else model


def _describe(service: Service, startup: Startup, template: Path | None) -> tuple[ServedModel, ChatTemplate | None]:
    """Return what the front has to know of an engine that is there."""
    from piecework.api.location import locate
    from piecework.server.generation import ServedModel
    from piecework.server.template import read_template
    from piecework.server.words import Words

    engine = service.engine
    if engine is None:
        raise EngineError("the engine is not there", hint="the log has the reason")
    served = engine.served
    words = Words(served.tokenizer, served.vocabulary_size)
    folder = Path(locate(startup.model, offline=startup.model_flags.offline))
    model = ServedModel(service, words, engine.max_length, _model_name(startup.model))
    return model, read_template(folder, template)


def answer_once(url: str, startup: Startup, prompt: str, api_keys: list[str] | None, as_json: bool) -> int:
    """Ask the server that runs for one answer, and list what that compiled."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=600)
    headers = {"Content-Type": "application/json"}
    if api_keys:
        headers["Authorization"] = f"Bearer {api_keys[0]}"
    body = json.dumps({"prompt": prompt, "max_tokens": 16, "temperature": 0})
    try:
        connection.request("POST", "/v1/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "error" in answer:
        raise EngineError(answer["error"]["message"], hint=answer["error"]["hint"])
    uncovered = startup.coverage.uncovered
    if as_json:
        from piecework.cli.output import print_json

        print_json(
            {
                "text": answer["choices"][0]["text"],
                "usage": answer["usage"],
                "specialisations": [found.as_dict() for found in startup.misses],
                "coverage": startup.coverage.ratio,
                "uncovered": {kind: shape.as_dict() for kind, shape in uncovered.items()},
            }
        )
        return 0
    print(answer["choices"][0]["text"])
    print(f"specialisations that this request caused: {len(startup.misses)}", file=sys.stderr)
    for found in startup.misses:
        print(f"  {found}", file=sys.stderr)
    print(f"shapes that the start had not run: {len(uncovered)}", file=sys.stderr)
    for kind in uncovered:
        print(f"  {kind}", file=sys.stderr)
    return 0


def run_prewarm(model: str, flags: Flags, as_json: bool) -> int:
    """Run the shapes that the flags name, and list what they compiled."""
    with _starting(model, flags, writes_manifest=False) as startup:

        def report(progress: Any) -> None:
            log.info("%s %s", progress, progress.detail)

        with startup.watching(lambda found: None):
            engine = startup.make_engine(report)
            engine.close()
    found = {
        "shapes": [shape.as_dict() for shape in startup.shapes],
        "refused": [shape.as_dict() for shape in startup.refused],
        "specialisations": [each.as_dict() for each in startup.misses],
    }
    if as_json:
        from piecework.cli.output import print_json

        print_json(found)
    else:
        print(f"{len(startup.shapes) - len(startup.refused)} of {len(startup.shapes)} shapes run, "
              f"{len(startup.misses)} compiles")  # fmt: skip
        for each in startup.misses:
            print(f"  {each}")
    return 1 if startup.refused else 0


