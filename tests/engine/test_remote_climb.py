"""A server that starts cold on a remote: what its compile process made reaches the remote, and serves elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.climbing import OPTIONS, SMALL, serve_until_climbed
from hostile.remote_starts import remote
from piecework.api.serving import open_engine
from piecework.engine.events import CompileProcess
from piecework.events import Recorder

pytest.importorskip("obstore")


@pytest.mark.slow
def test_what_the_compile_process_made_is_written_to_the_remote(
    folder: Path, answers: list[list[int]], tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    url = (tmp_path / "bucket").as_uri()
    first, seen = remote(tmp_path / "first", url), Recorder()
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=first, observer=seen)
    serve_until_climbed(engine, answers)
    engine.close()
    assert [each.what for each in seen.of(CompileProcess)] == ["started", "done"]
    assert first.flush(60.0) == 0
    seen = Recorder()
    engine = open_engine(folder, options=OPTIONS, engine=SMALL, store=remote(tmp_path / "second", url), observer=seen)
    serve_until_climbed(engine, answers)
    engine.close()
    assert engine.status.tier == 1
    assert seen.of(CompileProcess) == []
