"""`piecework::kv_update`: write this step's keys and values into a site's pages."""

from __future__ import annotations

from torch import Tensor

from piecework.errors import StepError
from piecework.ops.library import register_opaque
from piecework.ops.step import current_step

NAME = "piecework::kv_update"


def kv_update(key: Tensor, value: Tensor, site: str) -> Tensor:
    """Write each row's key and value to its slot; rows of padding are not written.

    Tensors:
        key, value  [T, K, D]  model
        ->          [0]        model  a token: attention takes it, so that the graph holds the order of the two
    """
    step = current_step(NAME, site)
    for hook in step.before:
        hook(NAME, site)
    cache = step.cache(NAME, site)
    if key.shape[1:] != cache.row_shape or value.shape[1:] != cache.row_shape or key.dtype != cache.pages.dtype:
        raise _mismatch(key, value, site, cache.pages)
    step.backend.write(key, value, cache, step.layout(cache.page_size))
    for hook in step.after:
        hook(NAME, site)
    return key.new_empty(0)


def _mismatch(key: Tensor, value: Tensor, site: str, pages: Tensor) -> StepError:
    return StepError(
        f"`{NAME}` at site `{site}` got keys {list(key.shape)} `{key.dtype}` and values {list(value.shape)} "
        f"for pages of {list(pages.shape)} `{pages.dtype}`",
        hint="the last two sizes and the dtype of the pages are those of one token's keys",
        facts={"site": site, "key": list(key.shape), "value": list(value.shape), "pages": list(pages.shape)},
    )


def _fake(key: Tensor, value: Tensor, site: str) -> Tensor:
    return key.new_empty(0)


register_opaque(
    "kv_update(Tensor key, Tensor value, str site) -> Tensor",
    kv_update,
    _fake,
    capture="always",
    writes="kv_cache",
)
