"""Start vLLM's compile layer alone on the toy: its piecewise backend with Inductor, without its server or kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch

from peers import stand_ins
from peers.work import Started, Work, first_result
from toy_llama import OPERATOR, ToyLlama, fill_weights

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
_used = stand_ins.install(stand_ins.VLLM)
_declared: list[torch.library.Library] = []


def _declare_missing_operator() -> None:
    """Declare the one operator of vLLM's extension that a pass looks up by name; no graph here holds it."""
    if not hasattr(torch.ops._C, "rotary_embedding"):
        _declared.append(torch.library.Library("_C", "FRAGMENT"))
        _declared[-1].define("rotary_embedding(Tensor a) -> Tensor")


def _configuration() -> Any:
    """Ask for the piecewise mode, and put it back where the CPU platform takes it away."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig

    configuration = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            backend="inductor",
            splitting_ops=[OPERATOR],
            cudagraph_mode=CUDAGraphMode.NONE,
            use_inductor_graph_partition=False,
        )
    )
    compilation = configuration.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.backend = "inductor"
    compilation.splitting_ops = [OPERATOR]
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.compile_sizes = []
    # The mode switches on fusion passes that need CUDA operators and cannot be imported here.
    for field in dataclasses.fields(compilation.pass_config):
        if getattr(compilation.pass_config, field.name) is True and field.name != "eliminate_noops":
            setattr(compilation.pass_config, field.name, False)
    return configuration


@contextlib.contextmanager
def piecewise(work: Work) -> Iterator[Started]:
    """Compile the toy piecewise, as `support_torch_compile` does for vLLM's own models."""
    import vllm
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    _declare_missing_operator()
    configuration = _configuration()

    @support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})
    class Decorated(ToyLlama):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(work.shape)

        # The decorator reads the signature of the class's own forward.
        forward = ToyLlama.forward

    with set_current_vllm_config(configuration):
        model = Decorated(vllm_config=configuration)
    fill_weights(model)
    with (
        set_current_vllm_config(configuration),
        set_forward_context(None, configuration, num_tokens=work.num_tokens),
    ):
        started = first_result(model, work, version=vllm.__version__)
        started.facts.update(
            loaded_from_disk=bool(getattr(model, "was_aot_compile_fn_loaded_from_disk", False)),
            regions=compilation_counter.num_piecewise_graphs_seen,
            sites=compilation_counter.num_piecewise_capturable_graphs_seen,
            stand_ins=sorted(_used.used),
        )
        yield started
