"""Trace without weights: parameters on the meta device stand in as fake tensors of the real device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from piecework.values.tree import map_leaves


@contextmanager
def without_weights(model: torch.nn.Module, arguments: Mapping[str, Any], device: str) -> Iterator[Mapping[str, Any]]:
    """Give the block fake parameters, buffers and arguments where the model's parameters are on the meta device.

    Yields the arguments to trace with; the model is as before when the block ends. A model that has its
    weights is left alone.
    """
    if not any(parameter.device.type == "meta" for parameter in model.parameters()):
        yield arguments
        return
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> Any:
        if id(tensor) not in fakes:
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made
        return fakes[id(tensor)]

    owners: list[dict[str, Any]] = []
    for module in model.modules():
        owners += [module._parameters, module._buffers]
    originals = [dict(table) for table in owners]
    try:
        for table in owners:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fake(tensor)
        yield {
            name: map_leaves(lambda _, leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, value, name)
            for name, value in arguments.items()
        }
    finally:
        for table, original in zip(owners, originals, strict=True):
            table.update(original)
