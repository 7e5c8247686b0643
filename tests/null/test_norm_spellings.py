"""The norms of Transformers' modules: the operator by what they compute, each judged against float64."""

from __future__ import annotations

import copy
import inspect
from importlib import import_module

import pytest
import torch
from torch import nn

import piecework as pw
from fusion_models import WIDTH
from piecework.events import PassDone, Recorder
from piecework.values.difference import compare

# A class of each spelling that Transformers' models have, and whether it is the operator.
MODULES = {
    "llama.LlamaRMSNorm": 1, "gemma.GemmaRMSNorm": 1, "gemma3n.Gemma3nRMSNorm": 1, "idefics.IdeficsRMSNorm": 1,
    "longt5.LongT5LayerNorm": 1, "afmoe.AfmoeRMSNorm": 1, "helium.HeliumRMSNorm": 1, "llama4.Llama4TextRMSNorm": 1,
    "qwen3_next.Qwen3NextRMSNorm": 1, "falcon_mamba.FalconMambaRMSNorm": 1,
    "deepseek_v4.DeepseekV4UnweightedRMSNorm": 0,  # it rounds the root
    "dory.DoryL2Norm": 0,  # of a sum
    "cohere.CohereLayerNorm": 0,  # about its mean
}  # fmt: skip


def module_of(name: str) -> nn.Module:
    """Make a module of Transformers, or torch's own norm, with weights that are not ones."""
    folder, _, kind = name.partition(".")
    if folder == "torch":
        made: nn.Module = nn.RMSNorm(WIDTH)
    else:
        kind_of = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), kind)
        made = kind_of(*(() if "Unweighted" in kind or "L2" in kind else (WIDTH,)))
    for parameter in made.parameters():
        parameter.data = torch.linspace(0.5, 1.5, WIDTH)
    return made.bfloat16().eval().requires_grad_(False)


def name_of(module: nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters))


@pytest.mark.parametrize("name", ["torch.RMSNorm", *MODULES])
def test_a_module_is_the_operator_whatever_its_name(name: str) -> None:
    module, watch = module_of(name), Recorder()
    exact = copy.deepcopy(module).double()
    options = pw.CompileOptions(
        compiler="eager", custom_ops=("all",), max_num_batched_tokens=16, ranges=((1, 16),), passes=("no_ops",)
    )
    x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    program = pw.compile(
        module, (x,), dynamic={name_of(module): {1: "tokens"}}, options=options, store=pw.MemoryStore(), observer=watch,
    )  # fmt: skip
    found = [done.matches for done in watch.of(PassDone) if done.name == "find_norms"]
    assert sum(found) == MODULES.get(name, 1)
    for count in (1, 7, 16):
        given = torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(count)).bfloat16()
        difference = compare(f"at {count}", program(given), module(given), exact(given.double()))
        assert not difference.is_fault, difference.fault
