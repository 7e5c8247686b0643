"""On a miss the log names the nearest record and what differs, and says which layer served what was not compiled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.events import ArtifactCompiled, ArtifactReused, Recorder, RecordHit, RecordMiss
from piecework.store.nearest import Neighbours


def start(store: Any, observer: Any = None, **options: Any) -> pw.Program:
    chosen = pw.CompileOptions(**{"compiler": "eager", "max_num_batched_tokens": 64, **options})
    example = (torch.ones(3, 4),)
    dynamic = {"input": {0: "tokens"}}
    return pw.compile(nn.Linear(4, 4).eval(), example, dynamic=dynamic, options=chosen, store=store, observer=observer)


def test_the_log_names_the_nearest_program_and_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = start(pw.DiskStore(tmp_path))
    with caplog.at_level(logging.INFO, "piecework"):
        start(pw.DiskStore(tmp_path), max_num_batched_tokens=48)
    lines = [record.getMessage() for record in caplog.records if record.name == "piecework"]
    assert lines[0] == "no stored program is used: nothing is stored under these factors"
    assert lines[1].startswith(f"the nearest one, `{first.key[:20]}`, differs in config.options.max_num_batched_tokens")
    assert lines[1].endswith("`64` / `48`")
    assert [line for line in lines if line.startswith("piece 0") and line.endswith("was in the store (disk)")]


def test_an_artifact_that_is_compiled_names_the_nearest_of_its_piece(tmp_path: Path) -> None:
    start(pw.DiskStore(tmp_path))
    seen = Recorder()
    start(pw.DiskStore(tmp_path), seen, compiler="aot_eager")
    compiled = seen.of(ArtifactCompiled)
    assert compiled
    for event in compiled:
        assert event.nearest
        assert any(line.startswith("compiler.name: `eager` / `aot_eager`") for line in event.factors)
        assert not any(line.startswith(("range", "piece")) for line in event.factors)


def test_each_layer_is_named(tmp_path: Path) -> None:
    memory, seen = pw.MemoryStore(), Recorder()
    start(memory, seen)
    assert not seen.of(ArtifactReused)
    start(memory, seen)
    start(pw.DiskStore(tmp_path))
    start(pw.DiskStore(tmp_path), seen)
    assert [event.layer for event in seen.of(RecordHit)] == ["memory", "disk"]


def test_a_changed_source_is_said_once_a_candidate_kind() -> None:
    store, seen = pw.MemoryStore(), Recorder()
    start(store)
    start(store, seen, max_num_batched_tokens=32)
    miss = seen.of(RecordMiss)[0]
    assert miss.nearest and [line.partition(":")[0] for line in miss.factors] == [
        "config.options.max_num_batched_tokens"
    ]


def test_the_nearest_of_many_is_found_and_the_bound_is_told() -> None:
    """One record a group is read; where time runs out, it is said of how many the nearest is the nearest."""
    store = pw.MemoryStore()
    for number in range(200):
        for variant in range(3):
            factors = {"one": number, "two": "same", "three": {"deep": number % 7}}
            store.write_record("program", f"{number:064x}.{variant}", {"factors": factors})
    wanted = {"one": 150, "two": "same", "three": {"deep": 9}}
    found = Neighbours(store, "program").nearest(wanted)
    assert (found.key.partition(".")[0], found.compared, found.known) == (f"{150:064x}", 200, 200)
    assert found.differences == ("three.deep: `3` / `9`",)
    assert str(found) == f"`{found.key[:20]}`"
    hurried = Neighbours(store, "program", longest_s=0.0).nearest(wanted)
    assert (hurried.compared, hurried.known) == (1, 200)
    assert str(hurried).endswith("(of 1 compared, 200 are stored)")
