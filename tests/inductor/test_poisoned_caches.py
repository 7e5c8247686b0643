"""Torch's own caches decide nothing: with every file in them poisoned, a cold start gives what the model gives."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toy_box import run_starts, snapshot, write_package

# Fills torch's caches the way that torch.compile does, at the place where our own compiler runs would look.
FILL = """
import torch
from toybox.model import make
model = make(layers=2)
tokens = torch.arange(5)
compiled = torch.compile(model, dynamic=True)
with torch.no_grad():
    compiled(tokens)
"""


class Mark:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def poison(folder: Path, mark: Path) -> int:
    """Put a payload in place of every cached file, and rubbish in place of sources; return how many there were."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        is_source = path.suffix in (".py", ".cpp", ".h", ".cc")
        path.write_bytes(b"#error poisoned\nraise SystemExit\n" if is_source else pickle.dumps(Mark(mark)))
    return len(files)


@pytest.mark.slow
def test_poisoned_caches_change_nothing(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package")
    own = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home"),
    }  # fmt: skip
    for place in ("tmp", "home"):
        (tmp_path / place).mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    paths = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-c", FILL], env={**kept, **own, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, check=True
    )
    mark = tmp_path / "mark"
    poisoned = poison(tmp_path / "inductor", mark) + poison(tmp_path / "tmp", mark)
    assert poisoned > 5
    before = snapshot(tmp_path / "inductor")
    start = run_starts(
        package, tmp_path / "store", [{"config": {"layers": 2}}], options={"compiler": "inductor"}, **own
    ).starts[0]
    assert start.compiled and start.fall_backs == []
    assert start.difference < 1e-5
    assert not mark.exists()
    assert snapshot(tmp_path / "inductor") == before
