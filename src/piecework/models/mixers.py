"""State-space mixers of Transformers, with our recurrence: found by what they are made of and what they compute.

A mixer is taken where its parts are those of Mamba-2, and where, on random weights, it gives what ours gives.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn

from piecework.models.folder import StateSite, site_name
from piecework.ops import Step, allocate_states, step_context

_PARTS = {"in_proj", "conv1d", "norm", "out_proj"}
_VECTORS = {"A_log", "D", "dt_bias"}
_NUMBERS = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "layer_idx")
MOST_PARAMETERS = 1 << 28  # of a layer whose behaviour is tried: beyond, its structure has to do
TOKENS = 7


def swap_mixers(model: Any) -> tuple[StateSite, ...]:
    """Let each state-space mixer of a model run ours; return what their states hold. No class is changed."""
    found = [module for module in model.modules() if looks_like_mixer(module)]
    tried: dict[type, bool] = {}
    sites = []
    for module in found:
        kind = type(module)
        if kind not in tried:
            tried[kind] = behaves_alike(module)
        if tried[kind]:
            sites.append(_site_of(module))
            module.forward = types.MethodType(run_mixer, module)
    return tuple(sites)


def looks_like_mixer(module: nn.Module) -> bool:
    """Tell whether a module has the parts of a Mamba-2 mixer, and no others with weights."""
    children = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if children != _PARTS or own != _VECTORS or list(module.buffers()):
        return False
    if not all(isinstance(getattr(module, name, None), int) for name in _NUMBERS):
        return False
    inner, size = module.intermediate_size, module.n_groups * module.ssm_state_size  # type: ignore[operator]
    widths = (module.in_proj.out_features, module.conv1d.in_channels)  # type: ignore[union-attr]
    return bool(widths == (2 * inner + 2 * size + module.num_heads, inner + 2 * size))  # type: ignore[operator]


def behaves_alike(module: nn.Module) -> bool:
    """Tell whether a mixer gives what ours gives, on random weights and rows."""
    if sum(parameter.numel() for parameter in module.parameters()) > MOST_PARAMETERS:
        return True
    trial = copy.deepcopy(module).to_empty(device="cpu").double().eval()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=torch.float64) * 0.3)
        rows = torch.randn(1, TOKENS, trial.in_proj.in_features, generator=source, dtype=torch.float64)  # type: ignore[union-attr, arg-type]
        wanted = trial(rows)
        site = _site_of(trial)
        step = Step.from_lists(
            slots=range(TOKENS),
            query_starts=[0, TOKENS],
            sequence_lengths=[TOKENS],
            page_table=[[0]],
            sites=allocate_states([site], num_slots=1, dtype=torch.float64),
        )
        with step_context(step):
            got = run_mixer(trial, rows)
    return bool(torch.allclose(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())))


def run_mixer(module: Any, hidden_states: Tensor, *ignored: Any, **more: Any) -> Tensor:
    """Project flat tokens, run the recurrence, norm by the gate, and project back.

    Tensors:
        hidden_states  [1, T, E]  model
        ->             [1, T, E]  model
    """
    projected = module.in_proj(hidden_states)
    inner, heads = module.intermediate_size, module.num_heads
    gate, mixed, step_size = projected.split([inner, module.conv1d.in_channels, heads], dim=-1)
    out = mixed.new_empty((mixed.shape[1], inner))
    least, largest = module.time_step_limit
    torch.ops.piecework.state_scan(
        mixed[0],
        step_size[0],
        out,
        module.conv1d.weight,
        module.conv1d.bias,
        module.A_log,
        module.D,
        module.dt_bias,
        module.n_groups,
        float(least),
        float(largest),
        state_site_name(module),
    )
    back: Tensor = module.out_proj(module.norm(out[None], gate).to(hidden_states.dtype))
    return back


def state_site_name(module: Any) -> str:
    """Name the site of a layer's state; one layer may attend beside it."""
    return f"{site_name(module.layer_idx)}.state"


def _site_of(module: Any) -> StateSite:
    return StateSite(
        state_site_name(module),
        module.conv1d.in_channels,
        module.conv1d.kernel_size[0],
        module.num_heads,
        module.head_dim,
        module.ssm_state_size,
    )


