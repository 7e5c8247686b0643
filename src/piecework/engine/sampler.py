"""From logits to tokens: each row by its own sequence's parameters and its own random number, whoever else is there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.engine.sequence import SamplingParameters, TokenLogprobs
from piecework.engine.sequence import Sequence as Answer


@dataclass(frozen=True)
class Chosen:
    """The next token of one sequence, and its log probability where that was asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


def choose(logits: Tensor, answers: Sequence[Answer], end_of_sequence: Collection[int]) -> list[Chosen]:
    """Choose the next token of each sequence.

    Tensors:
        logits  [B, V]  model  a row a sequence, in order; not written to
    """
    best = logits.argmax(dim=-1).tolist()
    found = []
    for row, answer in enumerate(answers):
        parameters = answer.parameters
        token = best[row]
        banned = _banned(answer, end_of_sequence)
        is_plain = parameters.is_greedy and not parameters.has_penalties and answer.constraint is None
        if banned or not is_plain:
            token = _choose_one(logits[row].float(), answer, banned)
        logprobs = None
        if parameters.logprobs is not None:
            logprobs = _logprobs(logits[row].float(), token, parameters.logprobs)
        found.append(Chosen(token, logprobs))
    return found


def _choose_one(logits: Tensor, answer: Answer, banned: Collection[int]) -> int:
    """Choose one token that is not simply the likeliest.

    Tensors:
        logits  [V]  f32
    """
    parameters = answer.parameters
    changed = logits.clone()
    if parameters.has_penalties:
        _penalise(changed, answer)
    if answer.constraint is not None:
        changed.masked_fill_(~answer.constraint.allowed(changed.shape[0]).to(changed.device), float("-inf"))
    _ban(changed, banned)
    if parameters.is_greedy:
        return int(changed.argmax())
    return _draw(torch.softmax(changed.double() / parameters.temperature, dim=-1), parameters, answer.draw())


def _ban(logits: Tensor, banned: Collection[int]) -> None:
    """Take tokens out of the choice, unless nothing would be left: a grammar may allow the end alone.

    Tensors:
        logits  [V]  f32  MUTATED
    """
    tokens = [token for token in banned if token < logits.shape[0]]
    before = logits[tokens].clone()
    logits[tokens] = float("-inf")
    if tokens and not bool((logits > float("-inf")).any()):
        logits[tokens] = before


def _penalise(logits: Tensor, answer: Answer) -> None:
    """Lower what was said already.

    Tensors:
        logits  [V]  f32  MUTATED
    """
    parameters = answer.parameters
    if parameters.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(answer.token_ids)), device=logits.device)
        values = logits[seen]
        factor = parameters.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if answer.counts:
        said = torch.tensor(list(answer.counts), device=logits.device)
        counts = torch.tensor(list(answer.counts.values()), device=logits.device, dtype=logits.dtype)
        logits[said] -= parameters.presence_penalty + parameters.frequency_penalty * counts


def _draw(probabilities: Tensor, parameters: SamplingParameters, number: float) -> int:
    """Return the token at which the running sum of what is left passes `number` of the whole.

    Tensors:
        probabilities  [V]  f64
    """
    kept = probabilities
    order: Tensor | None = None
    if parameters.top_k and parameters.top_k < kept.shape[0]:
        kept, order = kept.topk(parameters.top_k)
    elif parameters.top_p < 1.0:
        kept, order = kept.sort(descending=True, stable=True)
    if parameters.top_p < 1.0:
        before = kept.cumsum(0) - kept  # of what top_k left, relative to its sum; the likeliest always stays
        kept = torch.where(before < parameters.top_p * kept.sum(), kept, 0.0)
    if parameters.min_p:
        kept = torch.where(kept >= parameters.min_p * kept.max(), kept, 0.0)
    left = kept.nonzero()
    if not left.numel():  # of logits that are no numbers
        return 0
    sums = kept.cumsum(0)
    place = int(torch.searchsorted(sums, number * sums[-1], right=True))
    place = min(place, int(left[-1]))
    return place if order is None else int(order[place])


def _banned(answer: Answer, end_of_sequence: Collection[int]) -> tuple[int, ...]:
    """Return the tokens that would end an answer before it has the length that was asked for."""
    parameters = answer.parameters
    if answer.num_generated >= parameters.min_tokens:
        return ()
    return (*end_of_sequence, *parameters.stop_token_ids)


def _logprobs(logits: Tensor, token: int, wanted: int) -> TokenLogprobs:
    """Tell how likely a token was, and what else was.

    Tensors:
        logits  [V]  f32
    """
    every = torch.log_softmax(logits, dim=-1)
    value = every[token]
    rank = int((every > value).sum()) + 1
    top = every.topk(min(wanted, every.shape[0])) if wanted else None
    pairs = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token, float(value), rank, pairs)
