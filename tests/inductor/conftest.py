"""Artifacts of the toy's pieces, compiled once for all tests, and a folder of kernels to load them from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from piecework.compilers.inductor import InductorCompiler
from piecework.values.artifact import Artifact
from piecework.values.digest import digest_bytes
from piecework.values.shapes import Range
from toy_pieces import PIECES

Artifacts = dict[tuple[str, int], Artifact]
WIDE, ONE = Range(2, 8192), Range(1, 1)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compile for one thread: the texts and kernels are then the same on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def artifacts(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Every piece of the toy for many tokens, and the middle one for one token."""
    boxes = [(name, WIDE) for name in PIECES] + [("middle", ONE)]
    with InductorCompiler(threads=1, working_folder=str(tmp_path_factory.mktemp("build"))) as compiler:
        return {(name, size.low): compiler.compile(PIECES[name], {"s0": size}) for name, size in boxes}


@pytest.fixture(scope="session")
def write_kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Artifact], Callable[[str], Path]]:
    """Return a function that writes an artifact's kernels to files and gives back what finds them by digest."""
    folder = tmp_path_factory.mktemp("kernels")

    def write(artifact: Artifact) -> Callable[[str], Path]:
        for data in artifact.kernels.values():
            path = folder / digest_bytes(data)
            if not path.exists():  # a library that is loaded already must not be written over
                path.write_bytes(data)
        return lambda digest: folder / digest

    return write
