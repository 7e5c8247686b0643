"""A model of Transformers on several ranks: its own plan, its heads, and what each rank's cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecework.errors import ModelError
from piecework.models.folder import KvSite, Site, require_pages, site_name
from piecework.models.skeleton import find_sites
from piecework.parallel.plan import Heads
from piecework.parallel.shard import rules_of, shard_model

_ATTENTION = ("self_attn", "attention", "attn", "self_attention")  # how models call the module that attends


def divide(
    skeleton: Any, sites: tuple[Site, ...], rules: Mapping[str, Any], ranks: int
) -> tuple[tuple[Site, ...], dict[str, Any]]:
    """Shrink a model without weights to one rank's part; return the part's sites and the rules of its weights."""
    paged = require_pages(sites, type(skeleton).__name__, "is not divided over ranks", "run it on one rank")
    slices = shard_model(skeleton, skeleton.tp_plan, ranks, heads_of(skeleton, paged))
    own = find_own_sites(skeleton, ranks)
    return own, rules_of(slices, rules, ranks, skeleton.state_dict())


def heads_of(skeleton: Any, sites: tuple[KvSite, ...]) -> dict[str, Heads]:
    """Return the heads of each attention module, by its path."""
    queries = int(skeleton.config.get_text_config().num_attention_heads)
    keys = {site.name: site.num_kv_heads for site in sites}
    found = {}
    for path, module in skeleton.named_modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and path.rpartition(".")[2] in _ATTENTION:
            found[path] = Heads(queries, keys[site_name(layer)])
    return found


def find_own_sites(skeleton: Any, ranks: int) -> tuple[Site, ...]:
    """Run the divided model on the meta device; raise ModelError where its code wants the whole."""
    try:
        return find_sites(skeleton)
    except ModelError:
        raise
    except Exception as error:  # of the model's own code, which knows its heads' number by itself
        raise ModelError(
            f"`{type(skeleton).__name__}` does not run on a part of its weights: {str(error).splitlines()[0]}",
            hint=f"its code takes sizes from its configuration; run it on one rank instead of {ranks}",
            facts={"ranks": ranks},
        ) from error
