"""`piecework::state_scan`: the recurrence of a state-space layer, its state in the step.

What a layer remembers of a sequence is of one size, however long the sequence: the last inputs of a short convolution,
and a matrix a head that decays and takes in each token (the state-space duality form of Mamba-2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from piecework.errors import StepError
from piecework.ops.library import register_opaque
from piecework.ops.step import Step, current_step

NAME = "piecework::state_scan"
CHUNK = 64
"""Tokens of a prompt that are taken in at once: within a chunk each sees each before it, as in attention."""


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """What one site remembers of each sequence, by its slot.

    Tensors:
        inputs  [N, ..., N]        model  the last inputs of the convolution; MUTATED; fixed address
        heads   [N, H, D, N]       f32    a matrix a head; MUTATED; fixed address
    """

    inputs: Tensor
    heads: Tensor

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        channels: int,
        width: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        *,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> RecurrentState:
        """Make an empty state: a sequence's first step does not read it."""
        return cls(
            torch.zeros(num_slots, channels, width - 1, dtype=dtype, device=device),
            torch.zeros(num_slots, num_heads, head_dim, state_size, dtype=torch.float32, device=device),
        )


class StateShape(Protocol):
    """What says how large one site's state is."""

    @property
    def name(self) -> str: ...

    @property
    def channels(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def state_size(self) -> int: ...


def allocate_states(
    sites: Sequence[StateShape], *, num_slots: int, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> dict[str, RecurrentState]:
    """Allocate every site's state for a number of sequences: once, so that its address holds."""
    return {
        site.name: RecurrentState.allocate(
            num_slots,
            site.channels,
            site.width,
            site.num_heads,
            site.head_dim,
            site.state_size,
            dtype=dtype,
            device=device,
        )
        for site in sites
    }


def state_scan(
    mixed: Tensor,
    step_size: Tensor,
    out: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    decay_log: Tensor,
    skip: Tensor,
    step_bias: Tensor,
    groups: int,
    least_step: float,
    largest_step: float,
    site: str,
) -> None:
    """Take each sequence's rows into its state, and read what it then holds.

    Tensors:
        mixed                       [T, N]     model  values, then what writes and what reads the state, a group each
        step_size                   [T, H]     model  before bias and softplus
        out                         [T, H*D]   model  MUTATED: filled; rows of padding become zeros
        conv_weight                 [N, 1, N]  model
        conv_bias                   [N]        model
        decay_log, skip, step_bias  [H]        any
    """
    step = current_step(NAME, site)
    for hook in step.before:
        hook(NAME, site)
    state = _state_of(step, site)
    for span in step.row_spans:
        if span.first == span.last:
            continue
        rows, slot = slice(span.first, span.last), span.slot
        before = state.inputs[slot] if span.start else torch.zeros_like(state.inputs[slot])
        seen = torch.cat((before, mixed[rows].transpose(0, 1)), dim=1).to(conv_weight.dtype)
        convolved = F.conv1d(seen[None], conv_weight, conv_bias, groups=conv_weight.shape[0])[0]
        state.inputs[slot].copy_(seen[:, seen.shape[1] - before.shape[1] :])
        bent = F.silu(convolved).transpose(0, 1).to(mixed.dtype)
        steps = F.softplus(step_size[rows] + step_bias.to(step_size.dtype)).clamp(least_step, largest_step)
        heads = state.heads[slot]
        start = heads.clone() if span.start else torch.zeros_like(heads)
        result, end = _scan(bent, steps.float(), -torch.exp(decay_log.float()), skip, groups, start)
        heads.copy_(end)
        out[rows] = result.to(out.dtype)
    if step.num_tokens < out.shape[0]:
        out[step.num_tokens :].zero_()
    for hook in step.after:
        hook(NAME, site)


def _scan(
    bent: Tensor, steps: Tensor, decay: Tensor, skip: Tensor, groups: int, heads: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence h = exp(decay * step) h + step * x b, y = h c + skip * x, chunk by chunk, in float32.

    Tensors:
        bent   [L, N]                   model
        steps  [L, H]                   f32
        decay  [H]                      f32
        skip   [H]                      any
        heads  [H, D, N]                f32    at the start
        ->     [L, H*D], [H, D, N]      f32
    """
    num_heads, head_dim, size = heads.shape
    values, writes, reads = bent.float().split([num_heads * head_dim, groups * size, groups * size], dim=-1)
    x = values.view(-1, num_heads, head_dim)
    b, c = (each.reshape(-1, groups, size).repeat_interleave(num_heads // groups, dim=1) for each in (writes, reads))
    results = []
    for first in range(0, x.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        x_LHD, b_LHN, c_LHN, step_LH = x[part], b[part], c[part], steps[part]
        gone_LH = torch.cumsum(decay * step_LH, dim=0)
        later = gone_LH[:, None] - gone_LH[None]  # what is left of token s when token l reads, as an exponent
        is_seen = torch.ones(later.shape[:2], dtype=torch.bool, device=later.device).tril()
        left = torch.exp(later.masked_fill(~is_seen[..., None], float("-inf")))
        taken_LHD = x_LHD * step_LH[..., None]
        score = torch.einsum("lhn,shn->lsh", c_LHN, b_LHN) * left
        own = torch.einsum("lsh,shd->lhd", score, taken_LHD)
        old = torch.einsum("lhn,hdn->lhd", c_LHN * torch.exp(gone_LH)[..., None], heads)
        results.append(own + old)
        kept = torch.exp(gone_LH[-1])[:, None, None] * heads
        heads = kept + torch.einsum("lhn,lhd->hdn", b_LHN * torch.exp(gone_LH[-1] - gone_LH)[..., None], taken_LHD)
    whole = torch.cat(results) + x * skip.float()[:, None]
    return whole.reshape(whole.shape[0], -1), heads


def _state_of(step: Step, site: str) -> RecurrentState:
    state = step.state(NAME, site)
    if isinstance(state, RecurrentState):
        return state
    raise StepError(
        f"`{NAME}` ran at site `{site}`, whose state is a `{type(state).__name__}` and no `RecurrentState`",
        hint="put a `RecurrentState` under the site's name",
        facts={"op": NAME, "site": site, "state": type(state).__name__},
    )


def _fake(*arguments: Any) -> None:
    """Describe nothing: it fills `out`, and no more."""


register_opaque(
    "state_scan(Tensor mixed, Tensor step_size, Tensor(a!) out, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor decay_log, Tensor skip, Tensor step_bias, int groups, float least_step, float largest_step, str site) "
    "-> ()",
    state_scan,
    _fake,
    capture="never",
)
