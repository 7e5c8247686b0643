"""Run Inductor on one rebuilt piece, and read from it all that an artifact needs.

Inductor is called through `compile_fx` with an inner compiler of ours around its own: that hands over the output code,
its module and the metadata of the functionalisation without a cache or a pickle in between. Torch's own caches are off
or lie in a private folder that goes with the build; none of them decides anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from piecework.errors import CompileError
from piecework.seam.apart import scheduler_pass
from piecework.seam.cpp_build import build_command, record_cpp_kernels, trust_processor
from piecework.seam.cpp_header import CppHeaders
from piecework.seam.failures import compile_error
from piecework.seam.layouts import keep_results, strict_decompositions
from piecework.seam.rebuild import RebuiltPiece
from piecework.seam.torch_phases import observe_torch
from piecework.span_events import sub_phase, waiting
from piecework.values.rewriting import PassStep, PieceRewrite
from piecework.values.shapes import Box

_COMPILING = threading.Lock()  # the compiler's settings and caches are the process's
_SETTINGS: Mapping[str, Any] = {
    # Checked by our own signature and guards, once a call instead of once a piece.
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "nan_asserts": False,
    # Weights are inputs; memory planning was measured slower (one `alloc_from_pool` a buffer and call).
    "freezing": False,
    "memory_planning": False,
    "cpp_wrapper": False,
    "graph_partition": False,
    "triton.cudagraphs": False,
    # No cache decides: ours is above all of them.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "bundle_triton_into_fx_graph_cache": False,
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    # Text that only a developer of the compiler reads, and line tables that hold paths of this machine.
    "benchmark_harness": False,
    "benchmark_kernel": False,
    "aot_inductor.enable_line_tables": False,
    "trace.enabled": False,
    "generate_intermediate_hooks": False,
}


@dataclass(frozen=True)
class CompilerOutput:
    """What Inductor made of a piece."""

    source: str
    module: Mapping[str, Any]
    compiled: Any
    metadata: Any
    vector_isa: str
    cpp_compiler: str
    cpp_command: str
    passes: tuple[PassStep, ...] = ()


def run_inductor(
    piece: RebuiltPiece,
    box: Box,
    options: Mapping[str, Any],
    *,
    is_trusting: bool = True,
    rewrite: PieceRewrite | None = None,
    apart: frozenset[str] = frozenset(),
) -> CompilerOutput:
    """Lower a piece inside `private_folder`; `options` are Inductor's own, on top of ours.

    C++ kernels are left as sources. `is_trusting` takes the processor's vector instructions for the compiler's.
    `rewrite` are passes over the functional graph, before Inductor's own. `apart` are opaque operators inside.
    """
    arranged = {"_post_fusion_custom_pass": scheduler_pass(apart), "reorder_for_peak_memory": False} if apart else {}
    try:
        return _compile(piece, _settings(is_trusting, {**arranged, **options}), is_trusting, rewrite)
    except Exception as error:
        raise compile_error(error, box) from error


def begin_header(headers: CppHeaders, options: Mapping[str, Any], parent: str | None, observer: Any) -> None:
    """Begin the precompiled header that builds with these settings will ask for, if nobody compiles just now.

    Without a C++ compiler there is no command to begin; the first piece that needs one tells of that.
    """
    from torch._inductor import config

    if not _COMPILING.acquire(blocking=False):
        return
    try:
        with config.patch(_known(_settings(True, options))), contextlib.suppress(Exception):
            trust_processor()
            headers.begin(build_command(), parent, observer)
    finally:
        _COMPILING.release()


def _settings(is_trusting: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    return {**_SETTINGS, "cpp.vec_isa_ok": True if is_trusting else None, **options}


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that this torch has."""
    from torch._inductor import config

    known = config.get_config_copy()
    return {name: value for name, value in settings.items() if name in known}


def _compile(
    piece: RebuiltPiece, settings: Mapping[str, Any], is_trusting: bool, rewrite: PieceRewrite | None
) -> CompilerOutput:
    import torch._functorch.config
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    promised = piece.results  # read now: the compiler edits the graph that it is handed
    captured: list[tuple[Any, Any]] = []
    steps: list[PassStep] = []

    def compile_inner(graph: Any, inputs: Any, **keywords: Any) -> Any:
        metadata = TracingContext.get().fw_metadata
        if rewrite is not None:
            steps.extend(rewrite(graph.graph))
        if keep_results(graph.graph, promised, metadata) or rewrite is not None:
            graph.recompile()
        output = compile_fx_inner(graph, inputs, **keywords)
        captured.append((output, metadata))
        return output

    patches = _known(settings)
    context = TracingContext(piece.mode)
    functorch = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    with (
        _exclusive(),
        tracing(context),
        torch._functorch.config.patch(functorch),
        config.patch({"triton.autotune_at_compile_time": True}),
        record_cpp_kernels(),
    ):
        if _on_cpu(piece) and is_trusting:
            trust_processor()
        with config.patch(patches):
            decompositions = strict_decompositions(select_decomp_table())
        with sub_phase("Inductor"):
            compile_fx(
                piece.module, list(piece.inputs), inner_compile=compile_inner, config_patches=patches,
                decompositions=decompositions,
            )  # fmt: skip
        if len(captured) != 1:
            raise RuntimeError(f"the compiler compiled {len(captured)} graphs for one piece")
        output, metadata = captured[0]
        with config.patch(patches):
            command = build_command() if _on_cpu(piece) else ""
            return CompilerOutput(
                output.source_code,
                _module_of(output),
                output,
                metadata,
                _picked_isa(piece),
                _cpp_compiler(piece),
                command,
                tuple(steps),
            )


def bundle(piece: RebuiltPiece, box: Box, options: Mapping[str, Any]) -> bytes:
    """Compile a piece to the bytes of torch's own `CompiledArtifact`, whose load imports the compiler."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    patches = _known(_settings(True, options))
    try:
        with _exclusive(), tracing(TracingContext(piece.mode)):
            artifact: Any = standalone_compile(
                piece.module,
                list(piece.inputs),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": patches | {"fx_graph_cache": True}},
                aot=True,
            )
            return bytes(artifact.serialize())
    except Exception as error:
        raise compile_error(error, box) from error


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """Compile alone in the process, without gradients."""
    with waiting(_COMPILING, "another piece is compiled"), torch.no_grad(), _quiet():
        observe_torch()
        yield


@contextlib.contextmanager
def exclusive_compile(box: Box) -> Iterator[None]:
    """Compile alone in the process; what fails is a CompileError that names the range."""
    try:
        with _exclusive():
            yield
    except CompileError:
        raise
    except Exception as error:
        raise compile_error(error, box) from error


def _module_of(output: Any) -> Mapping[str, Any]:
    """Return the globals of the output code's module, kernels among them.

    Found by its source among the modules that the compiler loaded: what the compiled graph calls is on some devices
    wrapped by functions of other modules.
    """
    from torch._inductor.codecache import PyCodeCache

    for module in reversed(PyCodeCache.modules):
        path = getattr(module, "__file__", "")
        if hasattr(module, "call") and os.path.isfile(path) and output.source_code in Path(path).read_text():
            return vars(module)
    raise CompileError("the compiler kept no module of its output code", hint="this torch release is not supported")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the compiler's log below errors: what it warns of is either in our guards or not the user's."""
    logger = logging.getLogger("torch._inductor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _on_cpu(piece: RebuiltPiece) -> bool:
    return all(t.device.type == "cpu" for t in piece.inputs if isinstance(t, torch.Tensor))


def _picked_isa(piece: RebuiltPiece) -> str:
    if not _on_cpu(piece):
        return ""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())


def _cpp_compiler(piece: RebuiltPiece) -> str:
    if not _on_cpu(piece):
        return ""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    text = str(get_compiler_version_info(get_cpp_compiler()))
    match = re.search(r"(?:gcc|clang) version [\d.]+", text)
    return match.group() if match else text[:80]
