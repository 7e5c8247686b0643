"""What each input of a traced graph is, by identity: an argument's leaf, a weight, a buffer, or a constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecework.seam.dynamo import Capture
from piecework.values.attributes import plain_tensors
from piecework.values.graph import Binding

UNOWNED = "constant_"  # how constants are named that no module holds


def name_inputs(
    model: torch.nn.Module, values: Sequence[Any], inputs: Sequence[tuple[str, Any]]
) -> list[Binding | None]:
    """Say what each graph input is, by identity; symbols' own placeholders give None."""
    static = _static_names(model)
    leaf_paths = {id(leaf): path for path, leaf in reversed(inputs) if isinstance(leaf, torch.Tensor)}
    attributes = {id(value): name for name, value in plain_tensors(model, torch.Tensor)}
    named: list[Binding | None] = []
    constants = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            named.append(None)
        elif id(value) in leaf_paths:
            named.append(Binding("input", leaf_paths[id(value)]))
        elif id(value) in static:
            named.append(static[id(value)])
        else:
            named.append(Binding("constant", attributes.get(id(value), f"{UNOWNED}{constants}")))
            constants += id(value) not in attributes
    return named


def unowned_inputs(captured: Capture, named: Sequence[Binding | None]) -> dict[int, str]:
    """Return the inputs that are tensors of no module and no caller (of a global, a closure), by position."""
    return {
        index: source
        for index, (binding, source) in enumerate(zip(named, captured.sources, strict=True))
        if binding is not None and binding.kind == "constant" and binding.name.startswith(UNOWNED) and source
    }


def _static_names(model: torch.nn.Module) -> dict[int, Binding]:
    names: dict[int, list[tuple[str, str, bool]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(("weight", name, True))
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(("buffer", name, name in persistent))
    return {
        key: Binding(found[0][0], found[0][1], None, tuple(name for _, name, _ in found[1:]), found[0][2])
        for key, found in names.items()
    }
