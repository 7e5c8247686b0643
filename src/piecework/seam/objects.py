"""Callables that a compiler of the user's made: they live in this process, and an artifact names them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from piecework.errors import Incompatible
from piecework.seam.code import FunctionCode
from piecework.values.artifact import OBJECT, Artifact

_PROCESS = uuid.uuid4().hex
_kept: dict[str, Callable[..., Any]] = {}
_lock = threading.Lock()


def keep(function: Callable[..., Any], parameters: Sequence[str], weights: Sequence[str]) -> Artifact:
    """Keep a callable for the life of the process, and return the artifact that names it."""
    with _lock:
        name = f"{_PROCESS}.{len(_kept)}"
        _kept[name] = function
    return Artifact(OBJECT, "", {}, (), {"object": name, "parameters": list(parameters), "weights": list(weights)})


def load_object(artifact: Artifact) -> FunctionCode:
    """Return the callable that an artifact of this process names."""
    with _lock:
        function = _kept.get(str(artifact.facts["object"]))
    if function is None:
        raise Incompatible(
            "the artifact was made by a compile function in another process, and cannot be stored",
            hint="compile again, with `store=MemoryStore()`",
        )
    return FunctionCode(function, len(artifact.facts["weights"]))
