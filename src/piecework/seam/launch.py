"""Launch Triton's compiled kernels by torch's own C launcher: no Triton, no compiler, no file but the cubin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_lock = threading.Lock()
_functions: dict[tuple[str, str, int], int] = {}


def make_launcher(facts: Mapping[str, Any], path: Path, device: int | None = None) -> Callable[..., None]:
    """Return a function of a kernel's arguments and a stream that launches it.

    `facts` are what the build recorded: grid expressions over the parameters, warps, shared memory, argument types.
    """
    parameters = ", ".join([*facts["parameters"], "stream"])
    passed = ", ".join([*facts["passed"], *["None"] * facts["scratch"]])
    lines = [
        f"def launcher({parameters}):",
        *(f"    {line}" for line in facts["before"]),
        f"    launch(function, {', '.join(facts['grid'])}, {facts['warps']}, {facts['shared']}, {facts['types']!r}, "
        f"({passed},), stream)",
    ]
    index = torch.cuda.current_device() if device is None else device
    names: dict[str, Any] = {
        "launch": torch._C._StaticCudaLauncher._launch_kernel,
        "function": _load(facts, path, index),
    }
    exec(compile("\n".join(lines), "<launcher>", "exec"), names)
    return names["launcher"]  # type: ignore[no-any-return]


def _load(facts: Mapping[str, Any], path: Path, device: int) -> int:
    """Load a cubin once per device; releases differ in what else the loader returns beside the function."""
    key = (str(path), facts["function"], device)
    with _lock:
        if key not in _functions:
            found = torch._C._StaticCudaLauncher._load_kernel(str(path), facts["function"], facts["shared"], device)
            # 2.11 and 2.12: (function, registers, spills); 2.13 and later: (module, function, registers, spills)
            _functions[key] = found[1] if len(found) == 4 else found[0]
        return _functions[key]
