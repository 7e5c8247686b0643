"""`piecework::attention`: attend over each sequence's pages."""

from __future__ import annotations

from torch import Tensor

from piecework.errors import StepError
from piecework.ops.library import register_opaque
from piecework.ops.reference import AttentionRule
from piecework.ops.step import current_step

NAME = "piecework::attention"


def attention(
    query: Tensor,
    token: Tensor,
    out: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    site: str,
) -> None:
    """Attend each row over its own sequence's pages, this step's keys included.

    Tensors:
        query  [T, H, D]  model  H a multiple of K; rows of padding give undefined rows
        token  [0]        any    from `kv_update` of the same site: nothing is read before it is written
        out    [T, H, D]  model  MUTATED: filled
        sinks  [H]        any    a logit a head that joins the softmax; None where the model has none

    A `sliding_window` of n lets a row see itself and the n - 1 tokens before it; 0 means all. `softcap` c bends a
    score s to c * tanh(s / c); 0.0 means none.
    """
    step = current_step(NAME, site)
    for hook in step.before:
        hook(NAME, site)
    cache = step.cache(NAME, site)
    kv_heads, head_dim = cache.row_shape
    if query.shape[1] % kv_heads or query.shape[2] != head_dim:
        raise StepError(
            f"`{NAME}` at site `{site}` got queries {list(query.shape)} for pages of {list(cache.pages.shape)}",
            hint="the query heads are a multiple of the pages' heads, and the head sizes are equal",
            facts={"site": site, "query": list(query.shape), "pages": list(cache.pages.shape)},
        )
    rule = AttentionRule(scaling, sliding_window, softcap, sinks)
    step.backend.attend(query, out, cache, step.layout(cache.page_size), rule)
    for hook in step.after:
        hook(NAME, site)


def _fake(
    query: Tensor,
    token: Tensor,
    out: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    site: str,
) -> None:
    return None


register_opaque(
    "attention(Tensor query, Tensor token, Tensor(a!) out, float scaling, int sliding_window, float softcap, "
    "Tensor? sinks, str site) -> ()",
    attention,
    _fake,
    capture="uniform_decode",
    reads="kv_cache",
)
