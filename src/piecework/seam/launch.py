"""Launch Triton's compiled kernels by torch's own C launcher: no Triton, no compiler, no file but the cubin."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
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


_CODES = {"i1": "i", "i32": "i", "i64": "l", "u32": "I", "fp32": "f", "fp64": "d"}  # what torch's launcher calls them


def quick_launch(binary: Any) -> Callable[[tuple[int, int, int], Sequence[Any]], None] | None:
    """Return what launches a kernel that Triton compiled, on the current stream, by torch's own launcher.

    It is called with a grid and all arguments, tensors as addresses, constants among them. None where the kernel takes
    what only Triton's launcher passes.
    """
    source, facts = binary.src, binary.metadata
    signature = getattr(source, "signature", None)
    if signature is None or any(getattr(facts, name, 0) for name in _SPECIAL) or getattr(facts, "num_ctas", 1) != 1:
        return None
    kinds = [signature.get(name, "constexpr") for name in source.fn.arg_names]
    positions = [index for index, kind in enumerate(kinds) if kind != "constexpr"]
    codes = ["O" if kinds[index].startswith("*") else _CODES.get(kinds[index], "") for index in positions]
    if "" in codes or len(positions) < 2:
        return None
    scratch = sum(hasattr(facts, name) for name in ("global_scratch_size", "profile_scratch_size"))
    types, absent = "".join(codes) + "O" * scratch, (None,) * scratch
    picked, device = operator.itemgetter(*positions), torch.cuda.current_device()
    function, warps, shared = binary.function, facts.num_warps, facts.shared
    launch, stream_of = torch._C._StaticCudaLauncher._launch_kernel, torch._C._cuda_getCurrentRawStream

    def call(grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        launch(function, *grid, warps, shared, types, picked(arguments) + absent, stream_of(device))

    return call


# Scratch memory that a launch allocates, cooperative and dependent launches.
_SPECIAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")


def _load(facts: Mapping[str, Any], path: Path, device: int) -> int:
    """Load a cubin once per device; releases differ in what else the loader returns beside the function."""
    key = (str(path), facts["function"], device)
    with _lock:
        if key not in _functions:
            found = torch._C._StaticCudaLauncher._load_kernel(str(path), facts["function"], facts["shared"], device)
            # 2.11 and 2.12: (function, registers, spills); 2.13 and later: (module, function, registers, spills)
            _functions[key] = found[1] if len(found) == 4 else found[0]
        return _functions[key]
