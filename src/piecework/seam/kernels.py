"""Take compiled kernels, constants and conventions out of Inductor's output, as bytes, text and plain facts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from piecework.seam.cpp_build import CppBuilds
from piecework.seam.cpp_source import CppKernel, join_kernels
from piecework.seam.inductor import CompilerOutput
from piecework.seam.vocabulary import Refusal
from piecework.values.artifact import LIBRARY

_LARGEST_CONSTANT = 4096
_LOOP = re.compile(r"\bfor\s*\(\s*(\w+)\s+\w+\s*=")
_WIDE_INTEGERS = {"int64_t", "long"}


def read_kernels(
    output: CompilerOutput, names: Sequence[str], builds: CppBuilds, own: Mapping[str, CppKernel]
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return kernels as bytes, by library, and the facts that loading them needs.

    C++ kernels are built here, to one library with an entry for each; every Triton kernel is a cubin of its own.
    `own` are kernels that are not the compiler's: a library each, the same for all pieces, built once.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    kernels: dict[str, bytes] = {}
    launches: dict[str, Any] = {}
    sources: dict[str, CppKernel] = {}
    for name in names:
        value = output.module.get(name)
        if isinstance(value, CppKernel):
            sources[name] = value
        elif type(value).__name__ == "CachingAutotuner":
            kernels[name], launches[name] = _read_triton_kernel(name, value)
        else:
            raise Refusal(f"kernel `{name}` is of an unknown type `{type(value).__name__}`")
    widths = [index_width(value) for name in names for value in (output.module.get(name),)]
    facts: dict[str, Any] = {"index_width": max(widths)} if widths else {}
    facts |= {"launches": launches} if launches else {}
    for name, kernel in own.items():
        kernels[name] = builds.build_once(join_kernels({name: kernel}), output.cpp_command, cache_dir())
    if sources:
        kernels[LIBRARY] = builds.build(join_kernels(sources), output.cpp_command, cache_dir())
        facts["entries"] = list(sources)
    return kernels, facts


def index_width(kernel: Any) -> int:
    """Return the bits of the integers that a kernel counts elements with.

    C++ kernels count in 64 bits. Triton's do in 32 where the compiler could show, or has assumed of the sizes in a
    guard, that no tensor has more elements than that; the numbers of elements then stand as `i32` in the signature.
    """
    if isinstance(kernel, CppKernel):
        return 64 if set(_LOOP.findall(kernel.source)) <= _WIDE_INTEGERS else 32
    return 64 if "i64" in kernel.triton_meta["signature"].values() else 32


def _read_triton_kernel(name: str, tuner: Any) -> tuple[bytes, dict[str, Any]]:
    """Return a Triton kernel's cubin and what a launch needs: grid, warps, shared memory, argument types."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
    from torch._inductor.runtime.triton_heuristics import GridExpr

    result = _chosen_result(name, tuner)
    kernel = result.kernel
    # Scratch pointers stand behind the last argument; torch's launcher is given None for each.
    scratch = int(bool(getattr(kernel, "has_global_scratch", 0))) + int(bool(getattr(kernel, "has_profile_scratch", 0)))
    _, parameters, absent = result._get_arg_lists(kernel.arg_names, kernel.declared_constexprs)
    passed = [
        argument
        for index, argument in enumerate(kernel.arg_names)
        if index not in kernel.full_constexprs and argument not in absent
    ]
    if len(passed) != len(kernel.arg_tys):
        raise Refusal(f"kernel `{name}` takes {len(kernel.arg_tys)} arguments where {len(passed)} are known")
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    device = tuner.triton_meta.get("device", 0) or 0
    folder = Path(triton_cache_dir(device)) / triton_hash_to_path_key(kernel.hash)
    facts = {
        "function": kernel.name,
        "shared": kernel.shared,
        "warps": kernel.num_warps,
        "types": kernel.arg_tys + "O" * scratch,
        "scratch": scratch,
        "parameters": [str(parameter) for parameter in parameters],
        "passed": [str(argument) for argument in passed],
        "before": [str(line) for line in grid.prefix],
        "grid": [str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)],
        "config": str(result.config),
    }
    return (folder / f"{kernel.name}.cubin").read_bytes(), facts


def _chosen_result(name: str, tuner: Any) -> Any:
    """Return the compile result that the tuner chose, the first where it has not measured."""
    results = [r for r in tuner.compile_results if type(r).__name__ == "StaticTritonCompileResult"]
    if not results:
        raise Refusal(f"kernel `{name}` cannot be launched without Triton")
    if len(tuner.launchers) == 1:
        chosen = str(tuner.launchers[0].config)
        return next((r for r in results if str(r.config) == chosen), results[0])
    return results[0]


def read_constants(output: CompilerOutput) -> dict[str, str]:
    """Return the tensors that the graph itself holds, as expressions."""
    if getattr(output.compiled, "torchbind_constants", None):
        raise Refusal("the graph holds script objects")
    constants = getattr(output.compiled, "constants", None) or {}
    return {name: _write_constant(name, tensor) for name, tensor in constants.items()}


def _write_constant(name: str, tensor: torch.Tensor) -> str:
    if tensor.numel() > _LARGEST_CONSTANT or tensor.is_complex() or not tensor.is_contiguous():
        raise Refusal(f"the graph holds a tensor `{name}` of {tensor.numel()} elements")
    values = re.sub(r"(?<![\w\"])(-?inf|nan)(?!\w)", r'float("\1")', repr(tensor.cpu().tolist()))
    return f'torch.tensor({values}, dtype={tensor.dtype}, device="{tensor.device.type}")'


def misaligned_inputs(output: CompilerOutput, names: Sequence[str]) -> Mapping[str, bool]:
    """Return the inputs that kernels take for 16-byte aligned, and whether each is written to.

    Releases from 2.13 on copy misaligned inputs in the output code itself, except those that are written to.
    """
    compiled = output.compiled
    written = set(getattr(compiled, "mutated_input_idxs", ()))
    checked = getattr(compiled, "inputs_to_check", ()) or ()
    if getattr(compiled, "_defers_input_alignment", False):
        checked = [index for index in checked if index in written]
    return {names[index]: index in written for index in checked}
