"""What a server climbs by: the store that it shares with its compile process, the job of that, and what is unproven."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from piecework.engine.compiling import Job
from piecework.engine.options import EngineOptions
from piecework.env import read_variables
from piecework.errors import OptionError
from piecework.models.folder import ModelFolder
from piecework.options import COMPILERS, CompileOptions
from piecework.seam.surroundings import variables
from piecework.stages.find import with_siblings
from piecework.store.disk import DiskStore
from piecework.store.protocol import ARTIFACT, FolderStore, KernelStore
from piecework.values.artifact import TEXT
from piecework.values.record import Record


def private_store() -> DiskStore:
    """Return a store of this process alone, for one that two processes cannot write to."""
    return DiskStore(tempfile.mkdtemp(prefix="piecework-"))


def compile_job(
    folder: ModelFolder, dtype: str, device: str, settings: CompileOptions, engine: EngineOptions, store: FolderStore
) -> Job:
    """Return what a compile process is asked for."""
    if not isinstance(settings.compiler, str):
        raise OptionError(
            "a compiler that is an object does not travel to the process that compiles",
            hint=f"name one of {', '.join(COMPILERS)}, or fill the store before",
        )
    return Job(
        folder=str(folder.path),
        dtype=dtype,
        device=device,
        options=plain_options(settings),
        store=str(store.path),
        trust="own" if store.is_vouched_for else "any",
        variables=read_variables((*variables(device), "CXX")),
        nice=engine.compile_nice,
        threads=torch.get_num_threads(),
    )


def plain_options(settings: CompileOptions) -> dict[str, Any]:
    """Return options as the plain data that `from_mapping` reads back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(settings).items()}


def unproven_artifacts(record: Record, store: KernelStore) -> tuple[str, ...]:
    """Return the keys of artifacts that do not serve before they were run beside their text.

    A record tells whether that was done before; where nobody stands for what records say, that is no proof.
    """
    found = []
    for one in with_siblings(record, store):
        for piece in one.pieces:
            for key in piece.artifacts.values():
                artifact = store.read_record(ARTIFACT, key)
                is_text = artifact["kind"] == TEXT and artifact["text"] == piece.text
                is_proven = store.is_vouched_for and artifact["facts"].get("verified") in ("drawn", "real")
                if not is_text and not is_proven:
                    found.append(key)
    return tuple(found)
