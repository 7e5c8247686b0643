"""Piecework: trace a PyTorch model once, cut it at its opaque operators, compile each distinct piece, capture, replay.

The public names are resolved when first used, so that `import piecework` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "compile": "piecework.api.programs",
    "compile_parts": "piecework.api.parts",
    "load": "piecework.api.programs",
    "capture": "piecework.api.captures",
    "Program": "piecework.runtime.program",
    "LLM": "piecework.api.llm",
    "SamplingParameters": "piecework.engine.sequence",
    "EngineOptions": "piecework.engine.options",
    "CompileOptions": "piecework.options",
    "CaptureOptions": "piecework.capture_options",
    "CapturedProgram": "piecework.runtime.replay",
    "DiskStore": "piecework.store.disk",
    "MemoryStore": "piecework.store.memory",
    "VerifyingStore": "piecework.store.verifying",
    "compilable": "piecework.values.declaration",
    "split_op": "piecework.values.declaration",
    "graph_pass": "piecework.passes.declare",
    "Rewritten": "piecework.values.rewriting",
    "DEFAULT_PASSES": "piecework.options",
    "Dim": "piecework.values.declaration",
    "no_compile": "piecework.seam.forbid:forbid_compilation",
    "errors": "piecework.errors",
    "events": "piecework.events",
}

__all__ = list(_PLACES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module `piecework` has no attribute `{name}`")
    path, _, attribute = place.partition(":")
    module = importlib.import_module(path)
    return module if path.endswith(f".{name}") else getattr(module, attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
