"""Plans of a tiny model, whose traffic is counted without compiling anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piecework.diagnostics.explain import find_or_plan
from piecework.events import ignore
from piecework.options import CompileOptions
from piecework.store.memory import MemoryStore
from piecework.store.protocol import Store
from piecework.values.record import Record
from tiny_models import tiny_config


def configured(folder: Path) -> Path:
    """Write a configuration, which is all that a plan needs."""
    tiny_config("llama", dtype="bfloat16").save_pretrained(folder)
    return folder


def plan(folder: Path, **changed: Any) -> tuple[Record, Store]:
    """Trace and cut the model of a folder, and return its record with the store that holds its texts."""
    options = CompileOptions(compiler="eager", max_num_batched_tokens=64, **changed).resolve()
    _, record, where = find_or_plan(
        str(folder), dtype="auto", device="cpu", options=options, store=MemoryStore(), observer=ignore, offline=True
    )
    return record, where
