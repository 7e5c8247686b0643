"""What every test starts from: no network, no cache of an earlier run, and golden texts that a flag refreshes."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.logging import LogCaptureHandler

# Read when the library is imported, so it has to stand before any test module is collected.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that rewrites golden texts instead of comparing with them."""
    parser.addoption("--refresh-golden", action="store_true", help="rewrite the golden texts; review the difference")


@pytest.fixture(scope="session", autouse=True)
def private_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the default store and torch's own caches fresh folders, so that no test finds what another run left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIECEWORK_STORE", str(tmp_path_factory.mktemp("store")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Iterator[None]:
    """Keep torch's structured trace, hundreds of lines a compile, out of what a failing test shows of the log.

    pytest gives its handlers to loggers that pass nothing up, as this one, too: they are taken off as the test begins.
    """
    log = logging.getLogger("torch.__trace")
    for handler in [each for each in log.handlers if isinstance(each, LogCaptureHandler)]:
        log.removeHandler(handler)
    yield


@pytest.fixture
def compare_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with the file that holds what it should be, or write that file under `--refresh-golden`."""

    def compare(path: Path, text: str) -> None:
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--refresh-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.is_file(), f"{path.name} is not there; write it with --refresh-golden and review it"
        expected = path.read_text()
        difference = "\n".join(
            difflib.unified_diff(expected.splitlines(), text.splitlines(), path.name, "now", lineterm="")
        )
        assert text == expected, f"{path.name} differs; if that is meant, use --refresh-golden and review\n{difference}"

    return compare


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, saying so."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none is here"))
