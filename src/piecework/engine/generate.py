"""Greedy generation for one prompt: prefill in chunks, then one token a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecework.errors import OptionError
from piecework.models.folder import MIN_ROWS, KvSite, Site, StateSite
from piecework.ops import PagedCache, Step, allocate_states, step_context

StepFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes input_ids [1, T], position_ids [1, T] and the index of the rows whose logits are wanted; returns logits, whose
last row is that of the last token."""


@dataclass(frozen=True)
class GeneratedToken:
    """One token, the seconds its step took, and by how much its logit led the next one's; `position` counts from 0."""

    token_id: int
    elapsed_s: float
    margin: float
    position: int = 0


@dataclass(frozen=True)
class Generation:
    """All tokens of one answer. `finished` is `stop` at an end-of-sequence token, `length` at the token limit."""

    tokens: tuple[GeneratedToken, ...]
    num_prompt_tokens: int
    finished: str

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def margins(self) -> list[float]:
        return [token.margin for token in self.tokens]

    @property
    def first_token_s(self) -> float:
        """Seconds of the whole prefill."""
        return self.tokens[0].elapsed_s if self.tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second once the first is out."""
        elapsed_s = sum(token.elapsed_s for token in self.tokens[1:])
        return (len(self.tokens) - 1) / elapsed_s if elapsed_s else 0.0


def allocate_caches(
    sites: Sequence[Site],
    *,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    num_slots: int = 1,
) -> dict[str, Any]:
    """Allocate every site's cache or state: once, so that its address holds for as long as it is used."""
    states = [site for site in sites if isinstance(site, StateSite)]
    return {
        site.name: PagedCache.allocate(
            num_pages, page_size, site.num_kv_heads, site.head_dim, dtype=dtype, device=device
        )
        for site in sites
        if isinstance(site, KvSite)
    } | dict(allocate_states(states, num_slots=num_slots, dtype=dtype, device=device))


def generate(
    step_function: StepFunction,
    prompt_ids: Sequence[int],
    *,
    sites: Sequence[Site],
    dtype: torch.dtype,
    max_tokens: int,
    end_of_sequence: Collection[int] = (),
    max_num_batched_tokens: int = 2048,
    max_positions: int = 0,
    device: str | torch.device = "cpu",
    on_token: Callable[[GeneratedToken], None] | None = None,
) -> Generation:
    """Continue a prompt greedily until it ends, or until `max_tokens` are out.

    Raises OptionError where the prompt is empty, or longer than the model's positions.
    """
    tokens: list[GeneratedToken] = []
    finished = "length"
    stream = generate_tokens(
        step_function,
        prompt_ids,
        sites=sites,
        dtype=dtype,
        max_tokens=max_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        max_positions=max_positions,
        device=device,
    )
    for token in stream:
        tokens.append(token)
        if on_token is not None:
            on_token(token)
        if token.token_id in end_of_sequence:
            finished = "stop"
            break
    return Generation(tuple(tokens), len(prompt_ids), finished)


def generate_tokens(
    step_function: StepFunction,
    prompt_ids: Sequence[int],
    *,
    sites: Sequence[Site],
    dtype: torch.dtype,
    max_tokens: int,
    max_num_batched_tokens: int = 2048,
    max_positions: int = 0,
    device: str | torch.device = "cpu",
) -> Iterator[GeneratedToken]:
    """Yield a prompt's continuation token by token; each is computed when it is asked for."""
    _check(prompt_ids, max_tokens, max_num_batched_tokens, max_positions)
    length = len(prompt_ids) + max_tokens
    if max_positions:
        length = min(length, max_positions)
    # One page holds the whole sequence: its keys then lie in a row, and attention reads them where they are.
    caches = allocate_caches(sites, num_pages=1, page_size=length, dtype=dtype, device=device)
    ids = list(prompt_ids)
    done = 0
    started = time.perf_counter()
    while len(ids) <= length and max_tokens:
        chunk = ids[done : done + max_num_batched_tokens]
        logits = run_step(step_function, chunk, done, caches, device)
        done += len(chunk)
        if done < len(ids):
            continue
        token_id, margin = _pick(logits)
        now = time.perf_counter()
        yield GeneratedToken(token_id, now - started, margin, len(ids) - len(prompt_ids))
        started = time.perf_counter()
        ids.append(token_id)
        if len(ids) >= len(prompt_ids) + max_tokens:
            return


def run_step(
    step_function: StepFunction,
    token_ids: Sequence[int],
    start: int,
    caches: Mapping[str, Any],
    device: str | torch.device = "cpu",
) -> Tensor:
    """Run one step of one sequence, whose single page is page 0, and return the logits of its last token.

    Tensors:
        ->  [V]  model

    Two rows are asked for where one is wanted: a compiler proves its graphs for sizes from 2 on, and a number of rows
    that is never 1 needs no artifacts of its own for that size. The product reads the same weights either way.
    """
    count = len(token_ids)
    step = Step.from_lists(
        slots=range(start, start + count),
        query_starts=[0, count],
        sequence_lengths=[start + count],
        page_table=[[0]],
        sites=caches,
        device=device,
    )
    rows = [count - 1] * MIN_ROWS
    with torch.inference_mode(), step_context(step):
        logits = step_function(
            torch.tensor([token_ids], device=device),
            torch.arange(start, start + count, device=device)[None],
            torch.tensor(rows, device=device),
        )
    return logits.reshape(-1, logits.shape[-1])[-1]


def _pick(logits: Tensor) -> tuple[int, float]:
    """Take the likeliest token, and its lead over the next.

    Tensors:
        logits  [V]  model
    """
    best = int(logits.argmax())
    if logits.shape[0] < 2:
        return best, float("inf")
    first, second = logits.float().topk(2).values.tolist()
    return best, first - second


def _check(prompt_ids: Sequence[int], max_tokens: int, max_num_batched_tokens: int, max_positions: int) -> None:
    if not prompt_ids:
        raise OptionError("the prompt has no tokens", hint="give at least one token: a beginning-of-text token serves")
    if max_tokens < 0 or max_num_batched_tokens < 1:
        raise OptionError(
            f"`max_tokens={max_tokens}`, `max_num_batched_tokens={max_num_batched_tokens}`: the first may not be "
            "negative, the second not below 1",
            hint="both count tokens",
        )
    if max_positions and len(prompt_ids) > max_positions:
        raise OptionError(
            f"the prompt has {len(prompt_ids)} tokens, and the model's positions end at {max_positions}",
            hint="shorten the prompt",
            facts={"num_prompt_tokens": len(prompt_ids), "max_positions": max_positions},
        )
