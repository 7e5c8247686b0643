"""Tiers: eager answers at once, what is compiled beside it is proven before it serves, and what fails is left."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import piecework as pw
import piecework.ops
from engine.climbing import OPTIONS, SMALL, serve, serve_until_climbed
from engine.counting import served
from piecework.api.served import step_function
from piecework.api.serving import open_engine
from piecework.engine.batch import empty_step
from piecework.engine.climb import Plan, capture, climb
from piecework.engine.events import CompileProcess, TierReady
from piecework.engine.loop import Engine
from piecework.engine.options import Progress
from piecework.engine.tiers import Tiers
from piecework.errors import StoreUnwritable
from piecework.events import Event, Recorder
from piecework.models.hugging_face import load_model
from piecework.pipeline import bind_record
from piecework.seam.forbid import count_compilation
from piecework.store.protocol import PROGRAM


def test_requests_are_answered_while_it_compiles_and_tier_1_comes_between_two_steps(
    climbed: tuple[Path, Recorder],
) -> None:
    _, recorder = climbed
    assert [each.what for each in recorder.of(CompileProcess)] == ["started", "done"]
    assert recorder.of(TierReady)[0].num_steps > 20


def test_with_a_warm_store_tier_1_serves_the_first_request_and_nothing_compiles(
    folder: Path, climbed: tuple[Path, Recorder], answers: list[list[int]]
) -> None:
    recorder = Recorder()
    with count_compilation() as counts, pw.no_compile():
        engine = open_engine(
            folder, options=OPTIONS, engine=SMALL, store=pw.DiskStore(climbed[0]), observer=recorder
        )
        assert engine.status.tier == 1 and not engine.has_background_work
        serve(engine, answers)
    assert not counts and recorder.of(CompileProcess) == []
    assert engine.status.steps_by_tier[0] == 0


def test_waiting_for_compiled_serves_nothing_before(
    folder: Path, climbed: tuple[Path, Recorder], answers: list[list[int]]
) -> None:
    options = replace(SMALL, wait_for="compiled")
    engine = open_engine(folder, options=OPTIONS, engine=options, store=pw.DiskStore(climbed[0]))
    assert engine.status.tier == 1
    serve(engine, answers)


def test_enforce_eager_compiles_nothing(folder: Path, answers: list[list[int]], tmp_path: Path) -> None:
    options = replace(SMALL, enforce_eager=True)
    engine = open_engine(folder, options=OPTIONS, engine=options, store=pw.DiskStore(tmp_path))
    assert not engine.has_background_work
    serve(engine, answers)
    assert engine.status.tier == 0 and not any(tmp_path.iterdir())


def test_how_much_of_the_weights_was_read_is_told_as_a_percentage(
    folder: Path, climbed: tuple[Path, Recorder]
) -> None:
    for store in (pw.DiskStore(climbed[0]), None):
        told: list[Progress] = []
        options = replace(SMALL, enforce_eager=store is None)
        open_engine(folder, options=OPTIONS, engine=options, store=store, report=told.append)
        shares = [each.done / each.total for each in told]
        assert shares == sorted(shares) and shares[0] < 0.5 < 0.9 < shares[-1] <= 1.0
        assert str(told[-1]) == f"loading {100 * told[-1].done // told[-1].total} %"


def test_a_program_that_is_wired_wrongly_is_found_in_steps_beside_eager(
    folder: Path, climbed: tuple[Path, Recorder], answers: list[list[int]], tmp_path: Path
) -> None:
    """Every piece is right by itself, and two weights stand in each other's place."""
    shutil.copytree(climbed[0], tmp_path / "store")
    store = pw.DiskStore(tmp_path / "store")
    (key,) = store.list_records(PROGRAM)
    loaded = load_model(folder)
    weights = {**dict(loaded.model.named_buffers()), **dict(loaded.model.named_parameters(remove_duplicate=False))}
    one, two = (f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1))
    weights |= {one: weights[two], two: weights[one]}
    recorder = Recorder()
    eager = replace(served(step_function(loaded.model, True)), sites=loaded.sites, vocabulary_size=96)
    tiers = Tiers(eager.step, recorder, num_sites=3)
    plan = Plan(
        store=store,
        bind=lambda key, record: bind_record(key, record, weights, piecework.ops.BODIES, store, recorder),
        step_of=lambda program: step_function(program, True),
        key=key,
    )
    tiers.climb(climb(tiers, plan, recorder))
    engine = Engine(eager, SMALL, tiers=tiers)
    serve_until_climbed(engine, answers)
    assert "its logits are off by" in engine.status.trouble
    assert engine.status.steps_by_tier[1] == 0
    assert store.list_records(PROGRAM) == [], "no later start is to serve it"


@pytest.mark.slow
def test_bytes_that_are_not_what_the_record_says_are_compiled_anew_while_eager_serves(
    folder: Path, climbed: tuple[Path, Recorder], answers: list[list[int]], tmp_path: Path
) -> None:
    shutil.copytree(climbed[0], tmp_path / "store")
    for blob in (tmp_path / "store" / "blobs").rglob("*"):
        if blob.is_file():
            blob.chmod(0o644)
            data = bytearray(blob.read_bytes())
            data[len(data) // 2] ^= 1
            blob.write_bytes(bytes(data))
    recorder = Recorder()
    store = pw.DiskStore(tmp_path / "store")
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=store, observer=recorder)
    assert engine.status.tier == 0
    serve_until_climbed(engine, answers)
    assert engine.status.tier == 1, engine.status.trouble


def killing(recorder: Recorder, times: int) -> Callable[[Event], None]:
    """Observe, and kill the compile process without a word as soon as it is there, so many times."""

    def observe(event: Event) -> None:
        recorder(event)
        if isinstance(event, CompileProcess) and event.what == "started" and len(of_starts(recorder)) <= times:
            os.kill(event.pid, signal.SIGKILL)

    return observe


def of_starts(recorder: Recorder) -> list[CompileProcess]:
    return [each for each in recorder.of(CompileProcess) if each.what == "started"]


def test_a_compile_process_that_is_killed_again_and_again_leaves_eager_serving(
    folder: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    recorder = Recorder()
    engine = open_engine(
        folder, options=OPTIONS, engine=SMALL, store=pw.DiskStore(tmp_path), observer=killing(recorder, 9)
    )
    serve_until_climbed(engine, answers)
    assert engine.status.tier == 0 and engine.status.is_ready
    assert "the compile process ended with signal 9 and said nothing" in engine.status.trouble
    assert [each.what for each in recorder.of(CompileProcess)] == ["started", "lost"] * 2


@pytest.mark.slow
def test_a_compile_process_that_is_killed_once_is_started_again(
    folder: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    recorder = Recorder()
    engine = open_engine(
        folder, options=OPTIONS, engine=SMALL, store=pw.DiskStore(tmp_path), observer=killing(recorder, 1)
    )
    serve_until_climbed(engine, answers)
    assert engine.status.tier == 1
    assert [each.what for each in recorder.of(CompileProcess)] == ["started", "lost", "started", "done"]


@pytest.mark.slow
def test_a_store_that_cannot_be_is_told_at_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file")
    store = pw.DiskStore(tmp_path / "file" / "store")
    with pytest.raises(StoreUnwritable, match="lies under"):
        open_engine(folder, options=OPTIONS, engine=SMALL, store=store)


def test_sizes_are_captured_in_gaps_and_what_is_captured_serves(
    folder: Path, climbed: tuple[Path, Recorder], answers: list[list[int]]
) -> None:
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=pw.DiskStore(climbed[0]))
    tiers = engine.tiers
    options = pw.CaptureOptions(decode="piecewise", decode_sizes=(2, 4), when="idle")
    programs: list[pw.CapturedProgram] = []

    def step_of(program: pw.CapturedProgram) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        programs.append(program)
        return step_function(program, True)

    (key,) = pw.DiskStore(climbed[0]).list_records(PROGRAM)
    program = pw.load(pw.DiskStore(climbed[0]), key=key, weights=folder, ops=piecework.ops.BODIES)
    captured = pw.capture(
        program,
        device="dry",
        options=options,
        steps=lambda phase, size: empty_step(tiers.caches, size, "cpu"),
        phase_of=lambda: tiers.phase,
    )
    tiers.climb(capture(tiers, captured, step_of, 1000.0))
    assert engine.has_background_work
    while engine.has_background_work:
        engine.idle()
    assert engine.status.tier == 2
    serve(engine, answers)
    assert programs[0].refused == {} and set(programs[0].sizes) == {("decode", 2), ("decode", 4)}
    assert programs[0].counts["decode", "piecewise"] > 0, programs[0].counts
    assert engine.status.trouble == "" and engine.status.steps_by_tier[2] > 0


def test_memory_left_for_pages_is_the_same_cold_and_warm(folder: Path, climbed: tuple[Path, Recorder]) -> None:
    options = replace(SMALL, num_pages=0, memory_fraction=0.9)
    warm = open_engine(folder, options=OPTIONS, engine=options, store=pw.DiskStore(climbed[0]))
    eager = open_engine(folder, options=OPTIONS, engine=replace(options, enforce_eager=True))
    assert warm.served.weights_bytes == eager.served.weights_bytes
    assert warm.pool.num_pages == eager.pool.num_pages == 3 * 256 // 4
    assert torch.is_tensor(warm.caches["layers.0"].pages)
