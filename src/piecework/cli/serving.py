"""Behind `serve` and `prewarm`: flags become a plan, and the plan a server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from piecework.cli.flags import CompileFlags, ModelFlags, StoreFlags
from piecework.cli.progress import progress
from piecework.cli.ranks import noting_signals, sharing
from piecework.cli.settings import Settings, gather, open_store
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
    from piecework.parallel.ranks import Ranks
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
    ranks: Ranks | None = None
    asked_to_end: Callable[[], None] = lambda: None
    misses: list[Specialisation] = field(default_factory=list)
    runner: WatchedRunner | None = None
    refused: tuple[StepShape, ...] = ()

    @property
    def follows(self) -> bool:
        """Whether this process runs what another one serves."""
        return self.ranks is not None and self.ranks.rank > 0

    def make_engine(self, report: Report, hear: Report = lambda progress: None) -> Engine:
        """Open the engine and run what it is to have run; called by the engine's own thread."""

        def told(progress: Progress) -> None:
            report(progress)
            hear(progress)

        from piecework.api.serving import open_engine
        from piecework.engine.prewarm import run_shapes, watch_shapes

        engine = open_engine(
            self.model, report=told, ranks=self.ranks, asked_to_end=self.asked_to_end, **self._asked()
        )
        self.runner = watch_shapes(engine, self.coverage)
        self.refused = run_shapes(engine, self.runner, self.shapes, told)
        return engine

    def follow(self) -> int:
        """Run the steps of rank 0's engine, until that ends."""
        from piecework.api.serving import open_follower

        assert self.ranks is not None
        follower = open_follower(self.model, ranks=self.ranks, **self._asked())
        with noting_signals() as is_asked_to_end:
            follower.follow(is_asked_to_end)
        return 0

    def _asked(self) -> dict[str, Any]:
        """Return what every rank opens the folder with."""
        flags = self.model_flags
        return {
            "dtype": flags.dtype,
            "device": flags.device,
            "options": self.settings.options,
            "engine": self.engine,
            "store": open_store(self.settings, self.observer),
            "observer": self.observer,
            "offline": flags.offline,
        }

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
    shapes: list[StepShape] = []
    manifest = prewarm_flags.manifest
    if manifest is not None and (manifest.exists() or not writes_manifest):
        shapes += shapes_in(read(manifest))
    if prewarm_flags.sweep is not None:
        shapes += parse_sweep(prewarm_flags.sweep)
    size = settings.options.tensor_parallel_size
    with progress() as draw, sharing(size, model_flags.device) as ranks:
        yield Startup(
            model=model,
            settings=settings,
            engine=_engine_options(engine_flags, compile_flags, settings),
            model_flags=model_flags,
            shapes=tuple(dict.fromkeys(shapes)),
            manifest=manifest if writes_manifest else None,
            coverage=Coverage(),
            observer=fan_out(Counters(), ReportLines(str(settings.store.store)), draw),
            ranks=ranks,
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
        step_ahead=flags.step_ahead,
        rank_timeout_s=flags.rank_timeout_s,
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
    with _starting(model, flags, writes_manifest=True) as startup, ExitStack() as stack:
        if startup.follows:
            return startup.follow()
        stack.enter_context(stop.on_signals())
        startup.asked_to_end = stop.set
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


def run_prewarm(model: str, flags: Flags, as_json: bool) -> int:
    """Run the shapes that the flags name, and list what they compiled."""
    with _starting(model, flags, writes_manifest=False) as startup:

        if startup.follows:
            return startup.follow()

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
