"""Mixtures of experts under Transformers' own interface, with our grouped product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import piecework.ops  # noqa: F401  registers `piecework::grouped_matmul`
from piecework.errors import ModelError
from piecework.seam.collectives import all_reduce


def has_swappable_experts(model: Any) -> bool:
    """Tell whether the model runs its experts through the interface."""
    return any(hasattr(module, "is_transposed") and hasattr(module, "has_gate") for module in model.modules())


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Send each token to its experts: sort by expert, two grouped products, sort back, weigh and add.

    Tensors:
        hidden_states  [T, E]  model
        top_k_index    [T, n]  i64    the experts of each token
        top_k_weights  [T, n]  any    how much each counts
        ->             [T, E]  model
    """
    # Transformers 5.17 has neither of the two names that are asked for with a default.
    if getattr(module, "_is_expert_parallel", False):
        raise ModelError(
            f"`{type(module).__name__}` splits its experts over several devices, which is not served",
            hint="load it without expert parallelism",
        )
    chosen = top_k_index.shape[1]
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    ends = torch.searchsorted(expert, torch.arange(module.num_experts, device=expert.device), right=True)
    rows = hidden_states[order // chosen]

    up = module.gate_up_proj if module.has_gate else module.up_proj
    product = torch.ops.piecework.grouped_matmul(rows.to(up.dtype), up, ends, module.is_transposed)
    if module.has_bias:
        product = product + (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias)[expert]
    product = module._apply_gate(product) if module.has_gate else module.act_fn(product)
    product = torch.ops.piecework.grouped_matmul(product, module.down_proj, ends, module.is_transposed)
    if module.has_bias:
        product = product + module.down_proj_bias[expert]
    if getattr(module, "has_post_expert_norm", False):
        product = module.post_expert_norm(product)

    weighted = product * top_k_weights.reshape(-1)[order][:, None]
    back = torch.argsort(order)
    mixed: Tensor = weighted[back].view(*top_k_index.shape, -1).sum(dim=1)
    mixed = mixed.to(hidden_states.dtype)
    shared = getattr(module, "tensor_parallel", None)  # each rank holds a slice of every expert
    return mixed if shared is None else all_reduce(mixed, shared.group)
