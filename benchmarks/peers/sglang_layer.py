"""Start SGLang's piecewise compile layer alone on the toy, with Inductor or with its default, eager pieces."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

import torch

from peers import stand_ins
from peers.work import Started, Work, first_result
from toy_llama import OPERATOR

_used = stand_ins.install(stand_ins.SGLANG)


def _answer_for_weak_references() -> None:
    """Stand in for the one module that raises at import without CUDA, and is called at capture alone."""
    module = types.ModuleType("weak_ref_tensor")
    module.__dict__["weak_ref_tensors"] = lambda tensors: tensors
    sys.modules["sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor"] = module


@contextlib.contextmanager
def _piecewise(work: Work, compiler: str) -> Iterator[Started]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    import sglang

    if not torch.cuda.is_available():
        _answer_for_weak_references()
    from sglang.srt.compilation.compilation_config import CompilationConfig
    from sglang.srt.compilation.compilation_counter import compilation_counter
    from sglang.srt.compilation.compile import install_torch_compiled
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import enable_tc_piecewise_cuda_graph

    configuration = CompilationConfig([], compiler=compiler)
    # Its splitter compares names as torch prints them, with and without the overload.
    for name in (OPERATOR.replace("::", "."), OPERATOR.replace("::", ".") + ".default"):
        configuration.add_split_op(name)
    model = work.model()
    install_torch_compiled(
        model,
        compile_config=configuration,
        graph_pool=(0, 0),
        fullgraph=True,
        dynamic_arg_dims={"input_ids": 0, "positions": 0},
    )
    with enable_tc_piecewise_cuda_graph():
        started = first_result(model, work, version=sglang.__version__)
        started.facts.update(
            regions=compilation_counter.num_piecewise_graphs_seen,
            sites=compilation_counter.num_piecewise_capturable_graphs_seen,
            stand_ins=sorted(_used.used),
        )
        yield started


@contextlib.contextmanager
def inductor(work: Work) -> Iterator[Started]:
    """Compile the pieces with Inductor."""
    with _piecewise(work, "inductor") as started:
        yield started


@contextlib.contextmanager
def eager(work: Work) -> Iterator[Started]:
    """Leave the pieces eager, which is the layer's default."""
    with _piecewise(work, "eager") as started:
        yield started
