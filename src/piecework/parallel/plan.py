"""A model's own tensor-parallel plan, read: which weight is divided along which dimension, and into what.

The words are those of Transformers' `base_model_tp_plan`. Dimensions are divided in whole units: one for each head of
keys and values in attention, single rows elsewhere. Where the ranks do not divide the units, the last ranks' slices are
filled up with zeros, which add nothing: every rank runs the same shapes, so the same artifact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from piecework.errors import ModelError

COLUMNS, ROWS, GATHERED, SPLIT = "colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"
VOCABULARY, PACKED, EXPERTS = "embedding_rowwise", "packed_colwise", "moe_tp_experts"
REPLICATED = frozenset({"replicated_with_grad_allreduce", "replicate", "local_params", "mla_kv_a_proj"})
ALIASES = {"colwise_rep": GATHERED, "rowwise_rep": SPLIT}
KNOWN = {COLUMNS, ROWS, GATHERED, SPLIT, VOCABULARY, PACKED, EXPERTS, *REPLICATED}


@dataclass(frozen=True)
class Slice:
    """How one weight is divided: `units` of dimension `dim`, over `parts` that are packed one after another in it."""

    dim: int
    units: int
    parts: int = 1


@dataclass(frozen=True)
class Heads:
    """How many heads an attention module has for queries, and for keys and values."""

    queries: int
    keys: int

    def check(self, where: str, ranks: int) -> None:
        """Raise ModelError where the heads cannot be spread over so many ranks."""
        spreads = self.keys >= ranks or (ranks % self.keys == 0 and self.queries % ranks == 0)
        if not spreads:
            raise ModelError(
                f"`{where}` has {self.queries} query heads and {self.keys} key-value heads, which {ranks} ranks cannot "
                "share",
                hint=f"use at most {self.keys} ranks, or a number that the key-value heads divide and that divides "
                "the query heads: each rank then holds a copy of one",
                facts={"queries": self.queries, "keys": self.keys, "ranks": ranks},
            )

    def units(self, name: str, ranks: int) -> int:
        """Return in how many units a projection of this attention is divided: whole groups of heads."""
        if self.keys >= ranks or name in ("k_proj", "v_proj"):
            return self.keys
        return ranks


def styles(plan: Mapping[str, str], paths: Iterable[str], kind: str) -> dict[str, str]:
    """Return the style of each path (of modules and parameters) that the plan speaks of; raise ModelError on others.

    Layer numbers are `*` in a plan. `kind` names the model in errors.
    """
    if not plan:
        raise ModelError(
            f"`{kind}` has no tensor-parallel plan",
            hint="models whose configuration has a `base_model_tp_plan` run on several ranks; run this one on one",
            facts={"model": kind},
        )
    found = {}
    for path in paths:
        style = plan.get(path) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None:
            continue
        style = ALIASES.get(style, style)
        if style not in KNOWN:
            raise ModelError(
                f"the tensor-parallel plan of `{kind}` asks for `{style}` at `{path}`, which is not served",
                hint=f"served are {', '.join(sorted(KNOWN | set(ALIASES)))}",
                facts={"model": kind, "style": style, "path": path},
            )
        found[path] = style
    return found
