"""The tensors that a program holds: each by its name in the program, found by the model's names for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from piecework.errors import BindError
from piecework.values.packing import join, part_specs
from piecework.values.record import Record
from piecework.values.signature import TensorSpec, contiguous_stride, parse_spec


def _static_names(record: Record) -> Iterator[tuple[str, str]]:
    for value, binding in record.values.items():
        if binding["kind"] in ("weight", "buffer", "constant"):
            yield value, binding["name"]


def static_values(record: Record, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensor of each weight, buffer and constant by its name in the program; joined parts are joined here.

    Tensors:
        weights  [...]  any  by qualified name; CHANGED where several are joined: each becomes a view of its rows
        ->       [...]  any
    """
    found: dict[str, torch.Tensor] = {}
    for value, name in _static_names(record):
        binding = record.values[value]
        spec = parse_spec(binding["spec"])
        assert isinstance(spec, TensorSpec)
        parts = part_specs(binding)
        if parts:
            tensors = [_given(weights, part, (), "weight") for part in parts]
            for (part, shape), tensor in zip(parts.items(), tensors, strict=True):
                _check_weight(part, replace(spec, shape=shape), tensor)
            found[value] = join(tensors)
            continue
        tensor = _given(weights, name, binding["aliases"], binding["kind"])
        _check_weight(name, spec, tensor)
        found[value] = tensor.detach()
    return found


def _given(weights: Mapping[str, torch.Tensor], name: str, aliases: Sequence[str], kind: str) -> torch.Tensor:
    tensor = next((weights[n] for n in (name, *aliases) if n in weights), None)
    if tensor is None:
        raise BindError(
            f"{kind} `{name}` is not among the weights given",
            hint="give every tensor that the program was traced with, by its qualified name",
            facts={"name": name},
        )
    return tensor


def weights_by_name(record: Record, static: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that a program reads by the model's names for them: joined ones as views of their rows.

    Tensors:
        static  [...]  any  by name in the program
        ->      [...]  any
    """
    found: dict[str, torch.Tensor] = {}
    for value, name in _static_names(record):
        parts = part_specs(record.values[value])
        views = torch.split(static[value], [shape[0] for shape in parts.values()]) if parts else (static[value],)
        found.update(zip(parts or (name,), views, strict=True))
    return found


def _check_weight(name: str, spec: TensorSpec, tensor: torch.Tensor) -> None:
    stride = spec.stride if spec.stride is not None else contiguous_stride(spec.shape)  # type: ignore[arg-type]
    got = TensorSpec(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        None if tuple(tensor.stride()) == contiguous_stride(tensor.shape) else tuple(tensor.stride()),
        tensor.device.type,
    )
    same = got.dtype == spec.dtype and got.shape == spec.shape and got.device == spec.device
    if not same or (tuple(tensor.stride()) != stride and not (spec.stride is None and tensor.is_contiguous())):
        raise BindError(
            f"weight `{name}` is `{got}`, the program was compiled for `{spec}`",
            hint="give the weights of the model that was compiled, in its dtype",
            facts={"name": name, "expected": str(spec), "got": str(got)},
        )
