"""Weights by name, straight from safetensors files or a state dict: torch and safetensors alone.

A name that no file holds is made by a *rule*: another name (tied weights, renamed checkpoints), or an expression over
names (experts that a checkpoint keeps apart and the model keeps in one tensor). Rules are JSON, so that a record
can carry them and a warm start needs no model library to follow them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from piecework.errors import BindError
from piecework.models.weight_files import Hear, SafetensorsFiles, StateDict, WeightSource, open_weights, unheard
from piecework.values.packing import allocate
from piecework.values.placement import ALONE, Placement

Expression: TypeAlias = "str | list[Any]"
"""A name, or `["stack" | "cat", dim, [expression, ...]]`, `["chunk", dim, index, count, expression]`,
`["transpose", dim, dim, expression]`; of a rank's own `["shard", dim, units, ranks, expression]` and `["rank", ranks]`.
"""

Rules: TypeAlias = Mapping[str, Expression]


class Expected(NamedTuple):
    """What a name must hold: a weight of another shape is an error, of another float dtype it is cast."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def load_weights(
    source: str | Path | Mapping[str, Tensor] | WeightSource,
    names: Mapping[str, Expected | tuple[tuple[int, ...], torch.dtype]] | Iterable[str],
    *,
    rules: Rules | None = None,
    device: str | torch.device = "cpu",
    together: Iterable[Sequence[str]] = (),
    hear: Hear = unheard,
    placement: Placement = ALONE,
) -> dict[str, Tensor]:
    """Read the weights that are asked for, each by its own name or by its rule.

    Names that come to the same tensor share it. With shapes and dtypes given, each weight is checked, and cast where
    both dtypes are floating. Names of one group of `together` come to lie one after another in one new tensor, and no
    page of the files that they were read from stays mapped. `hear` is told how much of the files was read. Rules of a
    rank's own are followed for `placement`. Raises
    BindError naming the weight, what was expected and what was found.
    """
    opened = open_weights(source) if isinstance(source, str | Path | Mapping) else source
    if isinstance(opened, SafetensorsFiles) and hear is not unheard:
        opened = opened.counting(hear)
    expected = {name: Expected(*each) for name, each in names.items()} if isinstance(names, Mapping) else {}
    known = opened.names()
    rules = rules or {}
    made: dict[tuple[str, torch.dtype | None], Tensor] = {}
    loaded: dict[str, Tensor] = {}
    if not isinstance(opened, StateDict):  # what is in memory already is joined where it lies
        for group in together:
            if not loaded.keys() & set(group):
                loaded |= _load_together(group, rules, opened, expected, device, placement)
    for name in names:
        if name in loaded:
            continue
        expression = _resolve(name, rules, known, opened)
        want = expected.get(name)
        at = (json.dumps(expression), want.dtype if want else None)
        if at not in made:
            tensor = evaluate(expression, opened, placement)
            made[at] = _fitted(name, tensor, want, opened).to(device)
        elif want and tuple(made[at].shape) != want.shape:
            _fitted(name, made[at], want, opened)
        loaded[name] = made[at]
    return loaded


def _load_together(
    group: Sequence[str],
    rules: Rules,
    source: WeightSource,
    expected: Mapping[str, Expected],
    device: Any,
    placement: Placement,
) -> dict[str, Tensor]:
    """Read tensors into rows of one new tensor; a file that was mapped for it is let go of afterwards."""
    fresh = source.reopened() if isinstance(source, SafetensorsFiles) else source
    known = fresh.names()
    parts = [(name, evaluate(_resolve(name, rules, known, fresh), fresh, placement)) for name in group]
    parts = [(name, _fitted(name, tensor, expected.get(name), fresh)) for name, tensor in parts]
    views = allocate([tensor.shape[0] for _, tensor in parts], parts[0][1], parts[0][1].dtype, device)
    for (_, tensor), view in zip(parts, views, strict=True):
        view.copy_(tensor)
    return dict(zip(group, views, strict=True))


def sources_of(expression: Expression) -> list[str]:
    """List the names that an expression reads."""
    if isinstance(expression, str):
        return [expression]
    if expression[0] == "rank":
        return []
    last = expression[-1]
    parts = last if expression[0] in ("stack", "cat") else [last]
    return [name for part in parts for name in sources_of(part)]


def evaluate(expression: Expression, source: WeightSource, placement: Placement = ALONE) -> Tensor:
    """Make the tensor that an expression describes, on the rank that it is made for."""
    if isinstance(expression, str):
        return source.read(expression)
    kind, *rest = expression
    if kind in ("stack", "cat"):
        dim, parts = rest
        join = torch.stack if kind == "stack" else torch.cat
        return join([evaluate(part, source, placement) for part in parts], dim=dim)
    if kind == "chunk":
        dim, index, count, part = rest
        return evaluate(part, source, placement).chunk(count, dim=dim)[index].contiguous()
    if kind == "transpose":
        first, second, part = rest
        return evaluate(part, source, placement).transpose(first, second).contiguous()
    if kind in ("shard", "rank"):
        return evaluate_own(expression, source, placement)
    raise BindError(
        f"a weight rule asks for `{kind}`, which this release does not know",
        hint="the record was written by a later release: build it again with this one",
        facts={"rule": expression},
    )


def evaluate_own(expression: Sequence[Any], source: WeightSource, placement: Placement) -> Tensor:
    """Make this rank's slice of a tensor, or its number; only the slice is copied out of a mapped file.

    `["shard", dim, units, ranks, whole]` gives each rank an equal count of units, the last ones zeros where there are
    no more; where several ranks come to one unit, each has it.
    """
    kind, *rest = expression
    made_for = rest[0] if kind == "rank" else rest[2]
    if made_for != placement.ranks:
        raise BindError(
            f"the weights are for {made_for} ranks, and this process is one of {placement.ranks}",
            hint=f"start it by `torchrun --nproc-per-node={made_for} … -tp {made_for}`",
            facts={"made_for": made_for, "ranks": placement.ranks},
        )
    if kind == "rank":
        return torch.tensor(placement.rank)
    dim, units, ranks, part = rest
    if (pushed := _inside(dim, units, ranks, part)) is not None:
        return evaluate(pushed, source, placement)
    whole = evaluate(part, source, placement)
    size = whole.shape[dim]
    if units > size or size % units:
        return whole  # of another model: it is told where its shape is compared
    unit, each = size // units, -(-units // ranks)
    shared = units < ranks and ranks % units == 0
    first = (placement.rank * units // ranks if shared else placement.rank * each) * unit
    last = min(first + each * unit, size)
    own = whole.narrow(dim, min(first, size), max(0, last - first)).contiguous()
    missing = each * unit - own.shape[dim]
    if not missing:
        return own.clone() if own.data_ptr() == whole.data_ptr() else own
    return torch.cat([own, own.new_zeros([missing if d == dim else n for d, n in enumerate(own.shape)])], dim=dim)


def _inside(dim: int, units: int, ranks: int, part: Expression) -> Expression | None:
    """Return a slice of a stack as the stack of slices: experts in files of their own are not read whole first."""
    if isinstance(part, str) or part[0] not in ("stack", "cat") or part[1] == dim:
        return None
    kind, at, parts = part
    inner = dim - (kind == "stack" and dim > at)
    return [kind, at, [["shard", inner, units, ranks, each] for each in parts]]


def assign(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put tensors in the place of a model's parameters and buffers, without a copy; shared ones stay shared."""
    parameters: dict[int, nn.Parameter] = {}
    for name, tensor in weights.items():
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        if last in dict(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(tensor) not in parameters:
                parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=False)
            setattr(owner, last, parameters[id(tensor)])
        elif last in dict(owner.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(owner, last, tensor)
        else:
            raise BindError(
                f"the model has no weight `{name}`",
                hint="the weights are of another model than the folder's configuration describes",
                facts={"name": name},
            )


def _resolve(name: str, rules: Rules, known: frozenset[str], source: WeightSource) -> Expression:
    expression = rules.get(name)
    if expression is not None and known.issuperset(sources_of(expression)):
        return expression
    if name in known:
        return name
    if expression is not None and not isinstance(expression, str):
        absent = sorted(set(sources_of(expression)) - known)
        what = f"the weight `{name}` is made of {len(sources_of(expression))} others, of which `{absent[0]}` is not in"
    else:
        what = f"the weight `{name}` is not in"
    raise BindError(
        f"{what} {source.description}",
        hint="the checkpoint is incomplete or of another model; " + _nearest(name, known),
        facts={"name": name, "rule": expression},
    )


def _nearest(name: str, known: frozenset[str]) -> str:
    if not known:
        return "it holds no weight at all"
    last = name.rpartition(".")[2]
    alike = sorted(other for other in known if other.endswith(last))[:3]
    return "it has " + ", ".join(f"`{other}`" for other in alike or sorted(known)[:3])


def _fitted(name: str, tensor: Tensor, want: Expected | None, source: WeightSource) -> Tensor:
    if want is None:
        return tensor
    if tuple(tensor.shape) != tuple(want.shape):
        raise BindError(
            f"the weight `{name}` has shape {list(tensor.shape)} in {source.description}, "
            f"and {list(want.shape)} was expected",
            hint="the checkpoint and the configuration are of different models",
            facts={"name": name, "expected": list(want.shape), "got": list(tensor.shape)},
        )
    if tensor.dtype == want.dtype:
        return tensor
    if not (tensor.dtype.is_floating_point and want.dtype.is_floating_point) or tensor.element_size() == 1:
        raise BindError(
            f"the weight `{name}` is `{tensor.dtype}` in {source.description}, and `{want.dtype}` was expected",
            hint="only floating dtypes of two bytes and more are cast; a quantised checkpoint is not served",
            facts={"name": name, "expected": str(want.dtype), "got": str(tensor.dtype)},
        )
    return tensor.to(want.dtype)


