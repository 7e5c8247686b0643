"""A small model that starts from a store with a remote behind it, and is held to its own results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import piecework as pw
from piecework.events import Recorder, StoreWarning, ignore
from piecework.store.disk import DiskStore
from piecework.store.link import Link
from piecework.store.remote import RemoteStore
from piecework.store.trust import AnyFiles, Trust

NUMBERS = torch.linspace(-1, 1, 40).reshape(5, 8)


def make() -> nn.Module:
    """Make the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).eval()


def start(store: Any, observer: Any = ignore) -> pw.Program:
    """Start the model, and hold its results to the model's own."""
    options = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64)
    program = pw.compile(
        make(), (torch.ones(3, 8),), dynamic={"input": {0: "tokens"}}, options=options, store=store, observer=observer
    )
    with torch.no_grad():
        assert torch.equal(program(NUMBERS), make()(NUMBERS))
    return program


def remote(folder: Path, url: str, observer: Any = ignore, trust: Trust | None = None, **more: Any) -> RemoteStore:
    """Open a folder with a remote behind it, and patience for a busy machine."""
    local = DiskStore(folder, trust=trust or AnyFiles(), observer=observer, **more)
    return RemoteStore(local, Link(url, observer=observer, patience_s=30.0), observer=observer)


def filled(folder: Path) -> DiskStore:
    """Return a store in which the model was started cold."""
    store = DiskStore(folder)
    start(store)
    return store


def warnings_of(recorder: Recorder) -> list[str]:
    """Return what was warned of."""
    return [event.reason for event in recorder.of(StoreWarning)]
