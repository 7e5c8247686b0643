"""What somebody planted in a store: found beside eager, set aside, made anew, and never served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import piecework as pw
from engine.climbing import OPTIONS, SMALL, serve_until_climbed
from piecework.api.serving import open_engine
from piecework.engine.events import CompileProcess
from piecework.events import FallBack, Recorder, VerificationFailed
from piecework.stages.find import read_program
from piecework.store.artifacts import write_artifact
from piecework.store.protocol import ARTIFACT, PROGRAM
from piecework.store.trust import AnyFiles, OwnFiles
from piecework.values.artifact import TEXT, Artifact


def plant(store: pw.DiskStore, **facts: str) -> str:
    """Put text that computes something else under an artifact's key: its bytes are what its record says."""
    (key,) = store.list_records(PROGRAM)
    piece = read_program(key, store).pieces[1]
    artifact_key = next(iter(piece.artifacts.values()))
    record = store.read_record(ARTIFACT, artifact_key)
    text = store.read_blob(record["text"]).decode()
    changed = text.replace(".contiguous()", ".neg()")
    assert changed != text
    write_artifact(store, artifact_key, Artifact(TEXT, changed, facts=facts), record["factors"])
    return artifact_key


def text_of(store: pw.DiskStore, key: str) -> str:
    return store.read_blob(store.read_record(ARTIFACT, key)["text"]).decode()


@pytest.mark.parametrize(("trust", "facts"), [(OwnFiles(), {}), (AnyFiles(), {"verified": "real"})])
def test_a_planted_artifact_never_serves_and_is_made_anew(
    trust: OwnFiles | AnyFiles, facts: dict[str, str],
    folder: Path, climbed: tuple[Path, Recorder], answers: list[list[int]], tmp_path: Path,
) -> None:  # fmt: skip
    """Its record may say that it was verified: where nobody stands for records, that is no proof."""
    shutil.copytree(climbed[0], tmp_path / "store")
    store = pw.DiskStore(tmp_path / "store", trust=trust)
    key = plant(store, **facts)
    planted, recorder = text_of(store, key), Recorder()
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=store, observer=recorder)
    assert engine.status.tier == 0 and engine.has_background_work
    serve_until_climbed(engine, answers)
    assert engine.status.tier == 1 and engine.status.trouble == ""
    assert len(recorder.of(VerificationFailed)) == 1
    assert [each.what for each in recorder.of(CompileProcess)] == ["started", "done"]
    assert "is not served" in recorder.of(FallBack)[-1].reason
    assert text_of(store, key) != planted
    assert [each.name.startswith(key) for each in (store.path / "quarantine").iterdir()] == [True]


def test_a_wrong_artifact_that_cannot_be_made_anew_runs_as_its_text(
    folder: Path, climbed: tuple[Path, Recorder], answers: list[list[int]], tmp_path: Path
) -> None:
    shutil.copytree(climbed[0], tmp_path / "store")
    key = plant(pw.DiskStore(tmp_path / "store"))
    store, recorder = pw.DiskStore(tmp_path / "store", read_only=True), Recorder()
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=store, observer=recorder)
    serve_until_climbed(engine, answers)
    assert engine.status.tier == 1 and recorder.of(CompileProcess) == []
    assert store.read_record(ARTIFACT, key)["facts"]["verified"] == "failed"
    assert [each.what for each in recorder.of(FallBack)] == ["piece 1 for `s0=2-16` runs eager"]


def test_records_of_ones_own_folder_are_believed(
    folder: Path, climbed: tuple[Path, Recorder], tmp_path: Path
) -> None:
    """Whoever can write there can run code as this user anyway."""
    shutil.copytree(climbed[0], tmp_path / "store")
    store = pw.DiskStore(tmp_path / "store")
    plant(store, verified="real")
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=store)
    assert engine.status.tier == 1 and not engine.has_background_work
