"""Everything that takes time on a start stands in the timeline: under what caused it, in the thread it ran in."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import piecework as pw
from capture_toys import captured, inputs, toy
from piecework.capture_events import Captured
from piecework.compilers.eager import EagerCompiler
from piecework.diagnostics.attribution import attribute
from piecework.diagnostics.counters import Counters
from piecework.diagnostics.event_lines import EventLines
from piecework.diagnostics.imports import ImportClock
from piecework.diagnostics.report_lines import ReportLines
from piecework.diagnostics.run_file import Run, title
from piecework.diagnostics.timeline import Timeline
from piecework.errors import OptionError, PieceworkError
from piecework.events import ArtifactCompiled, Phase, Recorder, RecordMiss, fan_out, phase
from piecework.span_events import Imported, SubPhase, sub_phase, waiting
from piecework.spans import carry, open_span, spanning
from piecework.values.artifact import Artifact
from piecework.values.key import program_key
from piecework.values.shapes import Box


class Telling(EagerCompiler):
    """Tells of two sub-phases, as a compiler of a user's own may."""

    name = "telling"

    def compile(self, text: str, box: Box) -> Artifact:
        with sub_phase("parse", "all of it"), sub_phase("inner"):
            return super().compile(text, box)


class Preparing(EagerCompiler):
    """Has something to begin before there are pieces, as a compiler of C++ has."""

    name = "inductor"

    def __init__(self) -> None:
        self.done: list[str] = []

    @contextmanager
    def preparing(self, observer: pw.events.Observer) -> Iterator[None]:
        self.done.append("begin")
        try:
            yield
        finally:
            self.done.append("end")

    def compile(self, text: str, box: Box) -> Artifact:
        self.done.append("compile")
        return super().compile(text, box)


def start(store: pw.MemoryStore, *observers: pw.events.Observer, **options: object) -> pw.Program:
    settings = pw.CompileOptions(**{"compiler": Telling(), "max_num_batched_tokens": 64, **options})  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return pw.compile(
        model, (torch.ones(3, 4),), dynamic={"input": {0: "tokens"}}, options=settings, store=store,
        observer=fan_out(*observers),
    )  # fmt: skip


def test_what_pieces_will_need_is_begun_before_the_trace_of_a_first_build_alone() -> None:
    compiler, store = Preparing(), pw.MemoryStore()
    watch = fan_out(lambda event: compiler.done.append(event.name) if isinstance(event, Phase) else None)
    start(store, watch, compiler=compiler)
    done = [name for name in compiler.done if name in ("begin", "model", "trace", "compile", "record", "end")]
    assert done == ["model", "begin", "trace", "compile", "compile", "compile", "record", "end"]
    compiler.done.clear()
    start(store, compiler=compiler)
    assert compiler.done == [], "it is warm"
    (key,) = store.list_records("program")
    stale = {**store.read_record("program", key), "cpp_compiler": "another"}
    store.delete_record("program", key)
    store.write_record("program", program_key(stale["factors"], stale), stale)
    misses = Recorder()
    start(store, misses, compiler=compiler)
    assert len(misses.of(RecordMiss)) == 1
    assert compiler.done == [], "its artifacts are there"

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if x.sum() > 0 else x.cos()

    with pytest.raises(PieceworkError):
        settings = pw.CompileOptions(compiler=compiler, max_num_batched_tokens=64)
        pw.compile(Branching(), (torch.ones(3, 4),), options=settings, store=store)
    assert compiler.done == ["begin", "end"]


def paths(run: Run) -> set[tuple[str, ...]]:
    return {span.path for span in attribute(run).spans}


def test_a_cold_start_has_each_phase_under_its_cause_and_a_warm_one_none_of_them() -> None:
    store, cold, warm = pw.MemoryStore(), Timeline(), Timeline()
    store.observer = cold
    key = start(store, cold, compile_threads=2, ranges=((1, 64),), size_one=False).key
    run = cold.run()
    names = {path[-1] for path in paths(run)}
    assert {"model", "trace", "split", "unique", "compile", "record", "load", "bind", "Dynamo"} <= names
    piece = next(path for path in paths(run) if path[-1].startswith("compile piece 0"))
    assert piece[0] == "compile"
    assert {(*piece, "parse"), (*piece, "parse", "inner")} <= paths(run)
    compiled = run.of("ArtifactCompiled")[0]
    written = [each["kind"] for each in run.of("StoreWrite") if each["parent"] == compiled["span"]]
    assert written == ["blob", "artifact"]
    assert ("trace", "Dynamo", "dynamo") in {path[:3] for path in paths(run)}
    assert ("load", "load piece 0 for s0=2-64") in {path[:2] for path in paths(run)}
    assert compiled["thread"] != threading.get_native_id()
    assert run.threads[compiled["process"], compiled["thread"]].startswith("piecework-compile")
    assert run.facts["keys"] == [key]
    assert 0 < run.ready_ns <= run.wall_ns

    store.observer = warm
    start(store, warm, compile_threads=2, ranges=((1, 64),), size_one=False)
    names = {path[-1] for path in paths(warm.run())}
    assert names & {"model", "trace", "split", "unique", "compile", "record", "parse"} == set()
    assert {"load", "bind"} <= names
    assert {each["kind"] for each in warm.run().of("StoreRead")} == {"program", "artifact", "blob"}
    assert warm.run().facts["counters"]["compiled"] == 0


def test_a_span_is_open_in_the_threads_that_are_given_work_from_it() -> None:
    seen = Recorder()
    with phase(seen, "outer"):
        number = open_span()
        thread = threading.Thread(target=carry(lambda: seen(Phase(name="carried"))))
        other = threading.Thread(target=lambda: seen(Phase(name="loose")))
        for each in (thread, other):
            each.start()
            each.join()
    carried, loose, outer = seen.of(Phase)
    assert (carried.parent, loose.parent, outer.parent, outer.span) == (number, 0, 0, number)
    assert len({carried.thread, outer.thread}) == 2
    assert open_span() == 0


def test_a_phase_that_raises_is_told_and_closed() -> None:
    seen = Recorder()
    with pytest.raises(ValueError, match="no"), phase(seen, "outer"), sub_phase("inner"):
        raise ValueError("no")
    assert [event.name for event in seen.events] == ["inner", "outer"]  # type: ignore[attr-defined]
    assert open_span() == 0
    with sub_phase("unobserved"):
        assert open_span() == 0


def test_waiting_for_a_lock_is_told() -> None:
    seen, lock = Recorder(), threading.Lock()
    with spanning(seen), waiting(lock, "another"):
        assert lock.locked()
    assert [(event.name, event.detail) for event in seen.of(SubPhase)] == [("wait", "another")]
    assert not lock.locked()


def test_imports_are_told_by_package_and_leave_the_loader_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = tmp_path / "outer_pack", tmp_path / "inner_pack"
    for folder in (outer, inner):
        folder.mkdir()
    (outer / "__init__.py").write_text("import json.tool\nfrom outer_pack import part\nimport inner_pack\n")
    (outer / "part.py").write_text("x = 1\n")
    (inner / "__init__.py").write_text("y = 1\n")
    (tmp_path / "broken_pack.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = Recorder()
    with ImportClock(seen):
        import outer_pack

        with pytest.raises(RuntimeError):
            __import__("broken_pack")
    told = {event.package: event for event in seen.of(Imported)}
    assert list(told) == ["inner_pack", "outer_pack", "broken_pack"]
    assert told["inner_pack"].parent == told["outer_pack"].span
    assert (told["outer_pack"].modules, told["inner_pack"].modules) == (2, 1)
    assert "exec_module" not in vars(outer_pack.__spec__.loader)
    assert not any(isinstance(finder, ImportClock) for finder in sys.meta_path)
    for name in ("outer_pack", "outer_pack.part", "inner_pack"):
        sys.modules.pop(name)


def test_lines_of_events_are_whole_and_in_order(tmp_path: Path) -> None:
    with EventLines(tmp_path / "events.jsonl") as lines:
        start(pw.MemoryStore(), lines)
        lines(Phase(name="last"))
    lines(Phase(name="dropped"))
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told[-1]["name"] == "last"
    compiled = [each for each in told if each["event"] == "ArtifactCompiled"]
    assert sorted(each["range"] for each in compiled) == ["s0=1", "s0=2-64"]
    assert {"time", "thread_name", "elapsed_s", "parent", "key"} <= set(compiled[0])
    with pytest.raises(OptionError, match="events cannot be written to"):
        EventLines(tmp_path / "no" / "events.jsonl")


def test_counters_tell_what_was_found_and_what_was_made() -> None:
    store, cold, warm = pw.MemoryStore(), Counters(), Counters()
    start(store, cold)
    start(store, warm)
    assert (cold.graphs, cold.sites, cold.distinct, cold.compiled, cold.loaded) == (1, 1, 1, 2, 2)
    assert (warm.graphs, warm.compiled, warm.loaded, warm.is_hit) == (0, 0, 2, True)
    assert sum(cold.compiled_for.values()) == 2
    assert cold.compiles_after_ready == warm.compiles_after_ready == 0
    cold(ArtifactCompiled(piece="piece 0", range="tokens=3", key="k", compiler="eager", size_bytes=1))
    assert cold.compiles_after_ready == 1
    assert cold.as_dict()["compiles_after_ready"] == 1


def test_counters_of_capture_tell_padding_and_what_no_size_serves() -> None:
    counters, timeline = Counters(), Timeline()
    program = captured(toy(), decode="full", decode_sizes=(2, 4), observer=fan_out(counters, timeline))
    for count in (2, 3, 4, 9):
        program(*inputs(count))
    assert (counters.captures, counters.replays, counters.padded, counters.padded_tokens) == (2, 3, 1, 1)
    assert counters.uncovered == 1
    assert {title(event) for event in timeline.run().of("Captured")} == {"capture decode 2", "capture decode 4"}
    assert {path[-1] for path in paths(timeline.run()) if "capture" in path[0]} >= {"warm-up run", "record"}
    assert timeline.run().of(Captured.__name__)[0]["span"] > 0


def test_the_log_names_the_part_and_keeps_a_total_for_each(caplog: pytest.LogCaptureFixture) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.decoder = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))

    store, options = pw.MemoryStore(), pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, size_one=False)

    def lines() -> list[str]:
        caplog.clear()
        examples = {path: (torch.ones(3, 4),) for path in ("vision", "decoder")}
        dynamic = {path: {"input": {0: "tokens"}} for path in examples}
        with caplog.at_level(logging.INFO, "piecework"):
            pw.compile_parts(
                Two().eval(), examples, dynamic=dynamic, options=options, store=store, observer=ReportLines("memory")
            )
        return [record.getMessage() for record in caplog.records if record.name == "piecework"]

    cold = lines()
    assert {line.split(": ")[0] for line in cold} == {"vision", "decoder"}
    assert "vision: compiled 1 artifacts, 0 were in the store" in cold
    assert "decoder: compiled 0 artifacts, 1 were in the store" in cold
    assert [line for line in cold if "Compiling a graph for compile range (2, 64)" in line][0].startswith("vision: ")
    warm = lines()
    assert [line.split(" in ")[0] for line in warm if "loaded" in line] == [
        "vision: loaded 1 artifacts", "decoder: loaded 1 artifacts",
    ]  # fmt: skip
    assert all(line.endswith("compiled 0") for line in warm if "loaded" in line)
