"""What each input of a traced graph is, by identity: an argument's leaf, a weight, a buffer, or a constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    held = {id(tensor): binding for tensor, binding in held_tensors(model)}
    leaf_paths = {id(leaf): path for path, leaf in reversed(inputs) if isinstance(leaf, torch.Tensor)}
    named: list[Binding | None] = []
    constants = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            named.append(None)
        elif id(value) in leaf_paths:
            named.append(Binding("input", leaf_paths[id(value)]))
        elif id(value) in held:
            named.append(held[id(value)])
        else:
            named.append(Binding("constant", f"{UNOWNED}{constants}"))
            constants += 1
    return named


def unowned_inputs(captured: Capture, named: Sequence[Binding | None]) -> dict[int, str]:
    """Return the inputs that are tensors of no module and no caller (of a global, a closure), by position."""
    return {
        index: source
        for index, (binding, source) in enumerate(zip(named, captured.sources, strict=True))
        if binding is not None and binding.kind == "constant" and binding.name.startswith(UNOWNED) and source
    }


def held_tensors(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, Binding]]:
    """Yield each tensor that a model holds and what it is: a plain attribute, unless it is a parameter or a buffer."""
    for name, value in plain_tensors(model, torch.Tensor):
        yield value, Binding("constant", name)
    names: dict[int, list[tuple[str, str, bool]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(("weight", name, True))
        tensors[id(parameter)] = parameter
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(("buffer", name, name in persistent))
        tensors[id(buffer)] = buffer
    for key, found in names.items():
        aliases = tuple(name for _, name, _ in found[1:])
        yield tensors[key], Binding(found[0][0], found[0][1], None, aliases, found[0][2])
