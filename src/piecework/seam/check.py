"""Whether this release of torch has the private names that the seam uses; asked once, at the compiler's first use."""

from __future__ import annotations

import functools
import importlib

import torch

from piecework.errors import CompileError

# Releases whose sources were read, and those on which the suite ran.
_RUN = "tested"
RELEASES = {"2.11": _RUN, "2.12": "untested", "2.13": _RUN, "2.14": "untested"}

# (module, dotted name, what needs it)
_LOADER_NAMES = (
    ("torch._C._dynamo.guards", "_empty_strided_cpu", "allocation in CPU pieces"),
    ("torch._C._dynamo.guards", "_reinterpret_tensor", "views in pieces"),
    ("torch._C._dynamo.guards", "_torchinductor_pyobject_tensor_data_ptr", "loading CPU kernels"),
)
_CUDA_NAMES = (
    ("torch._C", "_StaticCudaLauncher._load_kernel", "loading CUDA kernels"),
    ("torch._C", "_StaticCudaLauncher._launch_kernel", "launching CUDA kernels"),
    ("torch._C", "_cuda_getCurrentRawStream", "the stream of CUDA kernels"),
    ("torch._C._dynamo.guards", "_empty_strided_cuda", "allocation in CUDA pieces"),
)
_COMPILER_NAMES = (
    ("torch._inductor.compile_fx", "compile_fx", "compiling"),
    ("torch._inductor.compile_fx", "compile_fx_inner", "reading the output code"),
    ("torch._inductor", "standalone_compile", "the fall-back artifact"),
    ("torch._inductor.standalone_compile", "AOTCompiledArtifact.deserialize", "the fall-back artifact"),
    ("torch._inductor.output_code", "CompiledFxGraph", "reading the output code"),
    ("torch._inductor.utils", "fresh_cache", "the private folder"),
    ("torch._inductor.utils", "clear_caches", "the private folder"),
    ("torch._inductor.codecache", "_HEADER_DIR", "the private folder"),
    ("torch._inductor.runtime.cache_dir_utils", "cache_dir", "the private folder"),
    ("torch._inductor.config", "get_config_copy", "the compiler's settings"),
    ("torch._inductor.config", "_post_fusion_custom_pass", "keeping opaque calls apart in whole graphs"),
    ("torch._inductor.virtualized", "V", "keeping opaque calls apart in whole graphs"),
    ("torch._inductor.cpu_vec_isa", "pick_vec_isa", "the facts of an artifact"),
    ("torch._inductor.cpp_builder", "get_compiler_version_info", "the facts of an artifact"),
    ("torch._functorch._aot_autograd.schemas", "ViewAndMutationMeta", "the calling convention"),
    ("torch._guards", "TracingContext", "compiling"),
    ("torch._subclasses", "FakeTensorMode", "rebuilding pieces"),
    ("torch._dispatch.python", "enable_python_dispatcher", "rebuilding pieces"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.create_symbol", "rebuilding pieces"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.constrain_symbol_range", "rebuilding pieces"),
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.create_unbacked_symint", "rebuilding pieces"),
    ("torch.utils._sympy.value_ranges", "bound_sympy", "reading guards"),
    ("torch.utils._sympy.printers", "PythonPrinter", "reading guards"),
)


def release_status(version: str = torch.__version__) -> str:
    """Say whether the seam was run on this release of torch: `tested` or `untested`."""
    return RELEASES.get(".".join(version.split(".")[:2]), "untested")


def self_test(*, compiler: bool = True) -> list[tuple[str, bool, str]]:
    """Look up every private name of torch that the seam uses; returns (name, is there, what needs it).

    Without `compiler`, only what loading needs is looked up, so that the compiler is not imported.
    """
    wanted = _LOADER_NAMES + (_CUDA_NAMES if torch.cuda.is_available() else ()) + (_COMPILER_NAMES if compiler else ())
    return [(f"{module}.{name}", _exists(module, name), purpose) for module, name, purpose in wanted]


def _exists(module: str, name: str) -> bool:
    try:
        place = importlib.import_module(module)
    except ImportError:
        return False
    for part in name.split("."):
        if not hasattr(place, part):
            return False
        place = getattr(place, part)
    return True


@functools.cache
def check_seam() -> None:
    """Raise if this release of torch lacks a name that compiling needs."""
    missing = [f"{name} ({purpose})" for name, is_there, purpose in self_test() if not is_there]
    if missing:
        raise CompileError(
            f"torch `{torch.__version__}` lacks `{'`, `'.join(missing)}`",
            hint=f"releases that Piecework was tested on: {', '.join(r for r, s in RELEASES.items() if s == _RUN)}",
        )
