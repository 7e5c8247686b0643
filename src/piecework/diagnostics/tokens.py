"""A model and its program on one prompt, at three levels that stay apart.

How far logits drift; whether greedy tokens are equal, and with what lead; whether a seeded draw from equal logits gives
equal tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecework.engine.generate import StepFunction, allocate_caches, run_step
from piecework.models.folder import Site
from piecework.values.difference import relative_error
from piecework.values.tolerance import decisive_margin


@dataclass(frozen=True)
class TokenStep:
    """One step: the drift of its logits, both greedy tokens, the lead of eager's, and the lead that decides.

    `drawn` are two tokens drawn with one seed from eager's logits, `drawn_own` one from each side's own.
    """

    error: float
    token: int
    other: int
    margin: float
    decisive: float
    drawn: tuple[int, int]
    drawn_own: tuple[int, int]

    @property
    def is_wrong(self) -> bool:
        """Tell whether greedy tokens differ though eager's leads by more than the allowed error can move."""
        return self.token != self.other and self.margin > self.decisive


def compare_tokens(
    eager: StepFunction,
    program: StepFunction,
    prompt_ids: Sequence[int],
    *,
    sites: Sequence[Site],
    dtype: torch.dtype,
    max_tokens: int,
    eager_error: float = 0.0,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[TokenStep, ...]:
    """Continue a prompt by eager's greedy tokens, and compare at each step; both have caches of their own."""
    length = len(prompt_ids) + max_tokens
    caches = [allocate_caches(sites, num_pages=1, page_size=length, dtype=dtype, device=device) for _ in range(2)]
    chunk, done, steps = list(prompt_ids), 0, []
    for _ in range(max_tokens):
        right = run_step(eager, chunk, done, caches[0], device).float()
        own = run_step(program, chunk, done, caches[1], device).float()
        step = _compare(right, own, dtype, eager_error, seed)
        steps.append(step)
        done += len(chunk)
        chunk = [step.token]
    return tuple(steps)


def _compare(right: Tensor, own: Tensor, dtype: torch.dtype, eager_error: float, seed: int) -> TokenStep:
    best = right.topk(min(2, len(right))).values.tolist()
    name = str(dtype).removeprefix("torch.")
    return TokenStep(
        error=relative_error(own, right),
        token=int(right.argmax()),
        other=int(own.argmax()),
        margin=best[0] - best[-1] if len(best) > 1 else float("inf"),
        decisive=decisive_margin(float(right.norm()), name, eager_error),
        drawn=(draw_token(right, seed), draw_token(right.clone(), seed)),
        drawn_own=(draw_token(right, seed), draw_token(own, seed)),
    )


def draw_token(logits: Tensor, seed: int) -> int:
    """Draw one token with a seed.

    Tensors:
        logits  [V]  f32
    """
    generator = torch.Generator(logits.device).manual_seed(seed)
    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))


def token_table(steps: Sequence[TokenStep]) -> dict[str, Any]:
    """Return the three levels as plain data."""
    differing = [number for number, step in enumerate(steps) if step.token != step.other]
    first = differing[0] if differing else -1
    return {
        "logits": {"largest_error": max((step.error for step in steps), default=0.0)},
        "greedy": {
            "equal": not differing,
            "first_step": first,
            "margin": steps[first].margin if differing else 0.0,
            "decisive_margin": steps[first].decisive if differing else 0.0,
            "wrong": any(step.is_wrong for step in steps),
        },
        "sampling": {
            "equal_on_equal_logits": all(step.drawn[0] == step.drawn[1] for step in steps),
            "equal_on_own_logits": all(step.drawn_own[0] == step.drawn_own[1] for step in steps),
        },
    }
