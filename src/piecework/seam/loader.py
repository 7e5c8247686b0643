"""From an artifact to a callable without a compiler: neither Inductor, Dynamo nor sympy is imported, nothing is built.

Cold and warm starts load by this one path. Only kind `torch`, the loud fall-back, imports the compiler.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import os
import re
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from piecework.errors import BindError, Incompatible, StoreError
from piecework.seam.code import FunctionCode, LoadedCode, calls_of
from piecework.seam.cut_text import TextRegion, cut_text
from piecework.seam.eager_text import prepare_text, prepared_names, prepared_source
from piecework.seam.launch import make_launcher
from piecework.seam.objects import load_object
from piecework.seam.probe import missing_for
from piecework.values.artifact import INDUCTOR, LIBRARY, OBJECT, TEXT, TORCH, Artifact
from piecework.values.digest import digest_bytes

KernelPath = Callable[[str], Path]  # a kernel's digest to a file that the dynamic linker can open
_DATA_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
_libraries: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(artifact: Artifact, *, kernel_path: KernelPath) -> LoadedCode | FunctionCode:
    """Make an artifact runnable; `kernel_path` gives the file of a kernel by the digest of its bytes."""
    if artifact.kind == TEXT:
        code, names, weights = prepare_text(artifact.text)
        return LoadedCode(code, names, weights, source=partial(prepared_source, artifact.text))
    if artifact.kind == OBJECT:
        return load_object(artifact)
    missing = missing_for(artifact.facts.get("machine", {}))
    if missing:
        raise Incompatible(
            f"the artifact was built for {missing}", hint="build it on this machine: `piecework build MODEL`"
        )
    if artifact.kind == INDUCTOR:
        return _load_inductor(artifact, kernel_path)
    if artifact.kind == TORCH:
        return _load_torch(artifact)
    raise Incompatible(f"artifact kind `{artifact.kind}` is unknown to this release", hint="upgrade Piecework")


def regions_of(artifact: Artifact, operators: Collection[str]) -> tuple[TextRegion, ...]:
    """Cut an artifact's text at operators (`ns::op`) without loading it; what has no text of its own has no regions."""
    if artifact.kind == TEXT:
        return cut_text(prepared_source(artifact.text), calls_of(prepared_names(artifact.text), operators))
    if artifact.kind != INDUCTOR:
        return ()
    return cut_text(artifact.text, _calls_in_head(artifact.text, operators))


def _calls_in_head(text: str, operators: Collection[str]) -> dict[str, str]:
    """Return the globals that stand for operators, as in `demo_mix_default = torch.ops.demo.mix.default`."""
    lines = re.findall(r"^(\w+) = torch\.ops\.(\w+)\.(\w+)(?:\.\w+)?$", text, re.MULTILINE)
    return {name: f"{space}::{op}" for name, space, op in lines if f"{space}::{op}" in operators}


def _load_inductor(artifact: Artifact, kernel_path: KernelPath) -> LoadedCode:
    facts = artifact.facts
    launches = facts.get("launches", {})
    names: dict[str, Any] = {"torch": torch, "math": math, "device_index": 0}
    names |= {
        "copy_if_misaligned": _copy_if_misaligned,
        "check_aligned": _check_aligned,
        "bias_addmm": _bias_addmm,
    }
    for name, data in artifact.kernels.items():
        path = kernel_path(digest_bytes(data))
        if name in launches:
            names[name] = make_launcher(launches[name], path)
        else:
            library = load_library(path)
            entries = facts["entries"] if name == LIBRARY else (name,)
            names |= {entry: getattr(library, entry) for entry in entries}
    if "cuda" in facts.get("devices", ()):
        names["device_index"] = torch.cuda.current_device()
    try:
        exec(compile(artifact.text, "<piece>", "exec"), names)
    except AttributeError as error:
        spaces = ", ".join(facts.get("namespaces", ())) or "unknown"
        raise BindError(
            f"a piece calls an operator that is not registered here: `{error}`",
            hint=f"import the module that registers the operators of `{spaces}` before loading",
        ) from error
    return LoadedCode(names["call"].__code__, names, facts["weights"], names.get("prepare"), artifact.text)


def load_library(path: Path) -> ModuleType:
    """Load a piece's C++ kernels, once in a process."""
    key = str(path)
    with _lock:
        if key not in _libraries:
            _libraries[key] = _import_library(path, len(_libraries))
        return _libraries[key]


def _import_library(path: Path, number: int) -> ModuleType:
    # The kernel's module asks for torch's function that reads a tensor's address by this variable, at its import.
    guards: Any = torch._C._dynamo.guards
    os.environ[_DATA_POINTER] = str(guards._torchinductor_pyobject_tensor_data_ptr)
    loader = importlib.machinery.ExtensionFileLoader(f"piecework_kernel_{number}.kernel", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader, origin=str(path))
    try:
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise _kernel_error(path, error) from error
    return module


def _kernel_error(path: Path, error: ImportError) -> Exception:
    text = str(error)
    if "failed to map segment" in text:
        return StoreError(
            f"kernel `{path.name}` cannot be loaded: its folder is mounted `noexec`",
            hint="put the store on a filesystem that allows running code: `--store DIR` or PIECEWORK_STORE=DIR",
            facts={"path": str(path)},
        )
    if "libgomp" in text:
        return Incompatible(f"kernel `{path.name}` needs the OpenMP runtime: `{text}`", hint="install libgomp1")
    return Incompatible(
        f"kernel `{path.name}` does not load on this machine: `{text}`",
        hint="build it on this machine: `piecework build MODEL`",
        facts={"path": str(path)},
    )


def _load_torch(artifact: Artifact) -> FunctionCode:
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    function = AOTCompiledArtifact.deserialize(artifact.kernels["artifact"])
    return FunctionCode(function, len(artifact.facts["weights"]))


def _copy_if_misaligned(tensor: Any) -> Any:
    if tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _bias_addmm(bias: Any, left: Any, right: Any, **options: Any) -> Any:
    """Add a product to a bias; one row that stands for all is passed as the vector it is, which cuBLASLt fuses."""
    is_one_row = bias.size(0) == 1 or (bias.size(0) > 0 and bias.stride(0) == 0)
    return torch.addmm(bias[0] if is_one_row else bias, left, right, **options)


def _check_aligned(tensor: Any) -> Any:
    if tensor.data_ptr() % 16:
        raise BindError(
            "a tensor that a piece writes to begins at an address that is no multiple of 16 bytes",
            hint="allocate caches whole, without an offset into other memory",
        )
    return tensor
