"""Rules that lead from a checkpoint's names to a model's: ties, renamings, and experts kept apart.

The model library's own table of conversions is read once, on a cold start, and written down as rules, so that cold and
warm starts load weights by the same code and the warm one needs no model library.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from piecework.errors import BindError
from piecework.models.weight_files import WeightSource
from piecework.models.weights import Expression, evaluate, sources_of


def weight_rules(model: Any, source: WeightSource | None = None) -> dict[str, Expression]:
    """Say how each of a model's weights is made of a checkpoint's, where it is not simply there under its own name.

    Without a checkpoint, the names are those that the model library would save the model under.
    """
    ties: dict[str, str] = dict(model.all_tied_weights_keys)
    wanted = model.state_dict()
    held = source.names() if source is not None else frozenset(revert_weight_conversion(model, wanted))
    rules: dict[str, Expression] = {}
    if any(name not in held and name not in ties and ties_back(name, ties) is None for name in wanted):
        rules.update(_converted(model, wanted, held))
    for name, origin in ties.items():
        _tie(name, origin, rules, held, source)
    return rules


def ties_back(name: str, ties: dict[str, str]) -> str | None:
    """Return a weight that is tied to `name`, where there is one."""
    return next((other for other, origin in ties.items() if origin == name), None)


def _tie(
    name: str, origin: str, rules: dict[str, Expression], held: frozenset[str], source: WeightSource | None
) -> None:
    """Tie two weights in whichever direction the checkpoint allows; keep them apart where it holds two that differ."""
    expression = rules.get(name, name if name in held else None)
    of_origin = rules.get(origin, origin if origin in held else None)
    if of_origin is None:
        if expression is not None:
            rules[origin] = expression
        return
    if expression is not None and expression != of_origin and source is not None:
        if not torch.equal(evaluate(expression, source), evaluate(of_origin, source)):
            return
    rules[name] = of_origin


def _converted(model: Any, wanted: dict[str, Any], held: frozenset[str]) -> dict[str, Expression]:
    """Follow the model library's table from a checkpoint's names to the model's."""
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, dict[str, list[str]]] = {}
    rules: dict[str, Expression] = {}
    for name in sorted(held, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, pattern = rename_source_key(name, [], [], prefix, wanted)
        if renamed not in wanted:
            continue
        if pattern is not None:
            groups.setdefault(renamed, {}).setdefault(pattern, []).append(name)
        elif renamed != name:
            rules[renamed] = name
    for first_name, sources in groups.items():
        rules.update(_translated(first_name, by_pattern[next(iter(sources))], sources))
    return rules


def _translated(first_name: str, converter: Any, sources: dict[str, list[str]]) -> dict[str, Expression]:
    """Write one entry of the table as expressions: the names that it makes, from the names that it collects."""
    targets = list(converter.target_patterns)
    parts: dict[str, Any] = {pattern: sources[pattern] for pattern in converter.source_patterns if pattern in sources}
    made: list[Expression] | None = None
    for operation in converter.operations:
        kind = type(operation)
        if kind is MergeModulelist:
            parts = {pattern: [["stack", operation.dim, names]] for pattern, names in parts.items()}
        elif kind is Concatenate:
            joined = [part for each in parts.values() for part in each]
            parts = {converter.source_patterns[0]: [["cat", operation.dim, joined]]}
        elif kind is Transpose and not operation.check_dims:
            ((pattern, (part,)),) = parts.items()
            parts = {pattern: [["transpose", operation.dim0, operation.dim1, part]]}
        elif kind is Chunk and operation.num_shards_attribute is None:
            ((pattern, (part,)),) = parts.items()
            made = [["chunk", operation.dim, index, len(targets), part] for index in range(len(targets))]
        else:
            raise BindError(
                f"the checkpoint keeps `{first_name}` in a form that is converted by `{kind.__name__}`, "
                "which Piecework does not know",
                hint="load the model with Transformers once and save it again: it then has the model's own names",
                facts={
                    "name": first_name,
                    "operation": kind.__name__,
                    "sources": sources_of(["cat", 0, list(sources)]),
                },
            )
    if made is None:
        ((_, (expression,)),) = parts.items()
        made = [expression]
    return {first_name.replace(targets[0], target): part for target, part in zip(targets, made, strict=True)}
