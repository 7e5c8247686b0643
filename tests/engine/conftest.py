"""One tiny model, its answers, and one store that a server filled while it served."""

from __future__ import annotations

from pathlib import Path

import pytest

import piecework as pw
from engine.climbing import OPTIONS, PROMPTS, SMALL, serve_until_climbed
from piecework.api.serving import open_engine
from piecework.engine.events import TierReady
from piecework.engine.generate import generate
from piecework.events import Recorder
from piecework.models.hugging_face import load_model
from tiny_models import tiny_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model."""
    return tiny_folder("llama", tmp_path_factory.mktemp("tiers") / "model")


@pytest.fixture(scope="session")
def answers(folder: Path) -> list[list[int]]:
    """Return what eager alone answers."""
    loaded = load_model(folder)
    found = [generate(loaded.model, p, sites=loaded.sites, dtype=loaded.dtype, max_tokens=5) for p in PROMPTS]
    assert min(margin for each in found for margin in each.margins) > 1e-4
    return [each.token_ids for each in found]


@pytest.fixture(scope="session")
def climbed(folder: Path, answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """Return a store that a server filled while it served, and what happened meanwhile."""
    store = pw.DiskStore(tmp_path_factory.mktemp("climbed") / "store")
    recorder = Recorder()
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=store, observer=recorder)
    assert engine.status.tier == 0 and engine.has_background_work
    serve_until_climbed(engine, answers)
    assert engine.status.tier == 1 and engine.status.trouble == ""
    assert [each.tier for each in recorder.of(TierReady)] == [1]
    assert all(steps > 0 for steps in engine.status.steps_by_tier[:2])
    engine.close()
    return store.path, recorder
