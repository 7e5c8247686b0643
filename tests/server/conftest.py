"""One tiny model and one server of it for those tests of a file that do not need a server of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.serving import Running, running, tiny_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model."""
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")  # no longer: what it hears of compiles is the process's
def server(folder: Path) -> Iterator[Running]:
    """Serve the tiny model."""
    with running(folder) as found:
        yield found
