"""Give a model without weights the shapes of one rank, and say how each of its weights is cut out of the whole.

Nothing here knows which rank: the shapes are the same on all, and the rank is a buffer that is filled when weights
are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from piecework.errors import ModelError
from piecework.parallel.layers import (
    RANK,
    Shared,
    gathered_linear,
    reduced_linear,
    split_linear,
    summed_embedding,
    use_forward,
)
from piecework.parallel.plan import (
    COLUMNS,
    EXPERTS,
    GATHERED,
    PACKED,
    REPLICATED,
    ROWS,
    SPLIT,
    VOCABULARY,
    Heads,
    Slice,
    styles,
)
from piecework.seam.collectives import prepare
from piecework.values.placement import group_name

_FORWARDS = {ROWS: reduced_linear, SPLIT: split_linear, GATHERED: gathered_linear}


def shard_model(model: nn.Module, plan: Mapping[str, str], ranks: int, heads: Mapping[str, Heads]) -> dict[str, Slice]:
    """Shrink a model's parameters to one rank's slices; return how each is cut, by its name.

    `plan` gives a style to paths of modules and parameters, as Transformers writes it; `heads` are those of each
    attention module, by its path. Raises ModelError for what is not served.
    """
    prepare()
    kind = type(model).__name__
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    paths = [*modules, *parameters]
    for path, each in heads.items():
        each.check(path, ranks)
    slices: dict[str, Slice] = {}
    for path, style in styles(plan, paths, kind).items():
        if style in REPLICATED:
            continue
        if path in parameters:
            slices[path] = _of_parameter(path, style, parameters[path], _units(path, heads, ranks))
        elif style == EXPERTS:
            _share_experts(path, modules[path], ranks)
        else:
            slices |= _of_module(path, style, modules[path], _units(path, heads, ranks), ranks)
    _shrink(model, slices, ranks)
    return slices


def rules_of(
    slices: Mapping[str, Slice], rules: Mapping[str, Any], ranks: int, names: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rules by which a rank's weights are made of the whole model's, on top of those that make the whole."""
    found = dict(rules)
    for name, cut in slices.items():
        whole = rules.get(name, name)
        cuts = [["shard", cut.dim, cut.units, ranks, part] for part in _parts(whole, cut)]
        found[name] = cuts[0] if len(cuts) == 1 else ["cat", cut.dim, cuts]
    return found | {name: ["rank", ranks] for name in names if name.rpartition(".")[2] == RANK}


def _parts(whole: Any, cut: Slice) -> list[Any]:
    """Return what is packed in a weight: what it is joined of, where it is, else its halves."""
    if not isinstance(whole, str) and whole[:2] == ["cat", cut.dim] and len(whole[2]) == cut.parts:
        return list(whole[2])
    if cut.parts == 1:
        return [whole]
    return [["chunk", cut.dim, index, cut.parts, whole] for index in range(cut.parts)]


def _units(path: str, heads: Mapping[str, Heads], ranks: int) -> int:
    """Return the units of what lies inside an attention module; 0 elsewhere: single rows."""
    owner = max((each for each in heads if path.startswith(f"{each}.")), key=len, default="")
    return heads[owner].units(path.rpartition(".")[2], ranks) if owner else 0


def _of_module(path: str, style: str, module: nn.Module, units: int, ranks: int) -> dict[str, Slice]:
    """Return how a module's weights are cut, and give it the forward that goes with it."""
    if style == VOCABULARY:
        if not isinstance(module, nn.Embedding):
            raise _not_served(path, style, module)
        module.padding_idx = None  # it counts for gradients alone, and may lie in another rank's slice
        use_forward(module, summed_embedding, Shared(group_name(ranks), ranks, module.num_embeddings), reads_rank=True)
        return {f"{path}.weight": Slice(0, module.num_embeddings)}
    if not isinstance(module, nn.Linear) or style not in (COLUMNS, PACKED, ROWS, SPLIT, GATHERED):
        raise _not_served(path, style, module)
    dim = 1 if style in (ROWS, SPLIT) else 0
    size = module.weight.shape[dim]
    parts = 2 if style == PACKED else 1
    if style in _FORWARDS:
        shared = Shared(group_name(ranks), ranks, size)
        use_forward(module, _FORWARDS[style], shared, reads_rank=style == SPLIT)
    cut = Slice(dim, _checked(path, units if style in (COLUMNS, ROWS) else 0, size, parts), parts)
    has_cut_bias = dim == 0 and module.bias is not None
    return {f"{path}.weight": cut} | ({f"{path}.bias": cut} if has_cut_bias else {})


def _of_parameter(path: str, style: str, parameter: torch.Tensor, units: int) -> Slice:
    """Return how a bare parameter is cut: experts', which lie in one tensor, or one number a head."""
    if style not in (COLUMNS, PACKED, ROWS):
        raise _not_served(path, style, parameter)
    dim = parameter.dim() - 1 if style == ROWS else max(parameter.dim() - 2, 0)
    parts = 2 if style == PACKED else 1
    return Slice(dim, _checked(path, units, parameter.shape[dim], parts), parts)


def _checked(path: str, units: int, size: int, parts: int) -> int:
    if size % parts or (units and size % units):
        raise ModelError(
            f"`{path}` has {size} rows to divide, which are no multiple of {units or parts}",
            hint="its heads do not lie one after another as the plan's `colwise` takes it: run this model on one rank",
            facts={"path": path, "size": size, "units": units or parts},
        )
    return units or size // parts


def _share_experts(path: str, module: Any, ranks: int) -> None:
    """Let a mixture of experts sum over the ranks what each made of its slice of every expert."""
    is_ours = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    if not is_ours or module.is_transposed or module.has_bias or module.has_post_expert_norm:
        raise _not_served(path, EXPERTS, module)
    module.tensor_parallel = Shared(group_name(ranks), ranks, 0)


def _shrink(model: nn.Module, slices: Mapping[str, Slice], ranks: int) -> None:
    """Put parameters of one rank's shapes in the place of the whole ones; tied ones stay tied."""
    made: dict[tuple[int, Slice], nn.Parameter] = {}
    for name, cut in slices.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        whole = getattr(module, last)
        shape = list(whole.shape)
        shape[cut.dim] = cut.parts * own_size(shape[cut.dim] // cut.parts, cut.units, ranks)
        at = (id(whole), cut)
        if at not in made:
            empty = torch.empty(shape, dtype=whole.dtype, device="meta")
            made[at] = nn.Parameter(empty, requires_grad=False)
        setattr(module, last, made[at])
        for attribute in ("in_features", "out_features"):
            if last == "weight" and isinstance(module, nn.Linear):
                setattr(module, attribute, made[at].shape[attribute == "in_features"])


def own_size(size: int, units: int, ranks: int) -> int:
    """Return how much of a dimension one rank holds, zeros included."""
    return -(-units // ranks) * (size // units)


def _not_served(path: str, style: str, what: Any) -> ModelError:
    return ModelError(
        f"the tensor-parallel plan asks for `{style}` at `{path}`, a `{type(what).__name__}`, which is not served so",
        hint="linears, embeddings and mixtures of experts without biases are divided: run this model on one rank",
        facts={"path": path, "style": style, "type": type(what).__name__},
    )
