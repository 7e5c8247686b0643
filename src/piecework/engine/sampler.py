"""From logits to tokens: each row by its own sequence's parameters and its own random number, whoever else is there.

All rows of a step go through the same few operations, and none of them waits for the device: tokens stay there, where
the next step reads them, and come to the host while that step runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.engine.readback import Read, read_back
from piecework.engine.sequence import Sequence as Answer
from piecework.engine.sequence import TokenLogprobs
from piecework.ops.numbers import on_device

ALL = 2.0  # a share that leaves everything in, however sums are rounded


@dataclass(frozen=True)
class Chosen:
    """The next token of one sequence, and its log probability where that was asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Choosing:
    """Tokens that a step chose: on the device at once, on the host when `read` returns.

    Tensors:
        tokens  [B]  i64  a row a sequence
    """

    tokens: Tensor
    _read: Read
    _told: tuple[tuple[int, int], ...]

    def read(self) -> list[Chosen]:
        """Wait for the tokens; return them in order."""
        tokens, *logprobs = (each.tolist() for each in self._read())
        found = {
            row: TokenLogprobs(tokens[row], value, rank, tuple(zip(likely[:wanted], theirs[:wanted], strict=True)))
            for (row, wanted), value, rank, likely, theirs in zip(self._told, *logprobs, strict=True)
        } if self._told else {}  # fmt: skip
        return [Chosen(token, found.get(row)) for row, token in enumerate(tokens)]


def choose(logits: Tensor, answers: Sequence[Answer], end_of_sequence: Collection[int]) -> list[Chosen]:
    """Choose the next token of each sequence.

    Tensors:
        logits  [B, V]  model  a row a sequence, in order; not written to
    """
    return start_choosing(logits, answers, end_of_sequence).read()


@torch.inference_mode()
def start_choosing(logits: Tensor, answers: Sequence[Answer], end_of_sequence: Collection[int]) -> Choosing:
    """Have the device choose the next token of each sequence; a row whose sequence has ended gets any.

    Tensors:
        logits  [B, V]  model  a row a sequence, in order; not written to, and not read once this returns
    """
    tokens = logits.argmax(dim=-1)
    alive = [(row, answer) for row, answer in enumerate(answers) if not answer.is_ended]
    special = [each for each in alive if _is_special(each[1])]
    if special:
        rows = _whole(logits, (row for row, _ in special))
        tokens.index_copy_(0, rows, _choose_rows(logits[rows].float(), [one for _, one in special], end_of_sequence))
    told = tuple((row, one.parameters.logprobs) for row, one in alive if one.parameters.logprobs is not None)
    found: tuple[Tensor, ...] = ()
    if told:
        rows = _whole(logits, (row for row, _ in told))
        found = _logprobs(logits[rows].float(), tokens[rows], max(wanted for _, wanted in told))
    return Choosing(tokens, read_back((tokens, *found)), told)


def _is_special(answer: Answer) -> bool:
    """Tell whether a token is anything but the likeliest of all."""
    parameters = answer.parameters
    is_greedy = parameters.is_greedy and not parameters.has_penalties and answer.constraint is None
    return not is_greedy or answer.num_generated < parameters.min_tokens


def _choose_rows(logits: Tensor, answers: Sequence[Answer], end_of_sequence: Collection[int]) -> Tensor:
    """Choose tokens that are not simply the likeliest.

    Tensors:
        logits  [N, V]  f32  MUTATED
        ->      [N]     i64
    """
    _penalise(logits, answers)
    held = [(row, answer.constraint) for row, answer in enumerate(answers) if answer.constraint is not None]
    if held:
        allowed = torch.stack([constraint.allowed(logits.shape[1]) for _, constraint in held]).to(logits.device)
        rows = _whole(logits, (row for row, _ in held))
        logits.index_copy_(0, rows, logits[rows].masked_fill_(~allowed, float("-inf")))
    _ban(logits, [_banned(answer, end_of_sequence) for answer in answers])
    tokens = logits.argmax(dim=-1)
    drawn = [(row, answer) for row, answer in enumerate(answers) if not answer.parameters.is_greedy]
    if drawn:
        rows = _whole(logits, (row for row, _ in drawn))
        heat = _column(logits, (answer.parameters.temperature for _, answer in drawn))
        chances = torch.softmax(logits[rows].double() / heat, dim=-1)
        tokens.index_copy_(0, rows, _draw(chances, [answer for _, answer in drawn]))
    return tokens


def _ban(logits: Tensor, banned: Sequence[Collection[int]]) -> None:
    """Take tokens out of the choice, unless nothing would be left of a row: a grammar may allow the end alone.

    Tensors:
        logits  [N, V]  f32  MUTATED
    """
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens if token < logits.shape[1]]
    if not pairs:
        return
    rows, tokens = (_whole(logits, each) for each in zip(*pairs, strict=True))
    left = logits.clone()
    left[rows, tokens] = float("-inf")
    logits.copy_(torch.where((left > float("-inf")).any(dim=-1, keepdim=True), left, logits))


def _penalise(logits: Tensor, answers: Sequence[Answer]) -> None:
    """Lower what was said already.

    Tensors:
        logits  [N, V]  f32  MUTATED
    """
    rows, tokens, factors = array("q"), array("q"), array("d")
    for row, answer in enumerate(answers):
        factor = answer.parameters.repetition_penalty
        if factor != 1.0:
            for some in (answer.prompt_tokens, array("q", answer.counts)):
                tokens.extend(some)
                rows.extend(array("q", [row]) * len(some))
                factors.extend(array("d", [factor]) * len(some))
    if tokens:
        at = on_device(rows, logits.device), on_device(tokens, logits.device)
        factor_of = on_device(factors, logits.device).float()
        values = logits[at]  # a token of the prompt that was said again comes twice, and is written the same twice
        logits[at] = torch.where(values > 0, values / factor_of, values * factor_of)
    rows, tokens, factors = array("q"), array("q"), array("d")
    for row, answer in enumerate(answers):
        once, each = answer.parameters.presence_penalty, answer.parameters.frequency_penalty
        if once or each:
            tokens.extend(array("q", answer.counts))
            rows.extend(array("q", [row]) * len(answer.counts))
            factors.extend(array("d", [once + each * count for count in answer.counts.values()]))
    if tokens:
        at = on_device(rows, logits.device), on_device(tokens, logits.device)
        logits[at] -= on_device(factors, logits.device).float()


def _draw(chances: Tensor, answers: Sequence[Answer]) -> Tensor:
    """Return the token at which the running sum of what is left passes each answer's number.

    Which tokens are left follows from their chances, and among equal ones from their order: never from other rows.

    Tensors:
        chances  [N, V]  f64
        ->       [N]     i64
    """
    chosen = chances.new_empty(chances.shape[0], dtype=torch.int64)
    for is_wanted in (_is_whole, _has_top_k, _has_top_p):
        members = [(row, answer) for row, answer in enumerate(answers) if is_wanted(answer, chances.shape[1])]
        if not members:
            continue
        some = [answer for _, answer in members]
        rows = _whole(chances, (row for row, _ in members))
        kept = chances if len(members) == len(answers) else chances[rows]
        if is_wanted is not _is_whole:
            kept = _likeliest(kept, some, is_sorted_whole=is_wanted is _has_top_p)
        if any(answer.parameters.min_p for answer in some):
            least = _column(kept, (answer.parameters.min_p for answer in some)) * kept.amax(dim=-1, keepdim=True)
            kept = torch.where(kept >= least, kept, 0.0)
        sums = kept.cumsum(dim=-1)
        numbers = _column(kept, (answer.draw() for answer in some)) * sums[:, -1:]
        place = torch.searchsorted(sums, numbers, right=True)
        # Not behind the last that is left; of logits that are no numbers nothing is, and token 0 is said.
        order = torch.arange(kept.shape[1], device=kept.device, dtype=torch.int32)
        last = torch.where(kept > 0, order, 0).amax(dim=-1, keepdim=True)
        chosen.index_copy_(0, rows, torch.minimum(place, last).squeeze(1))
    return chosen


def _likeliest(chances: Tensor, answers: Sequence[Answer], *, is_sorted_whole: bool) -> Tensor:
    """Keep what `top_k` and `top_p` leave in, and set all else to 0; `top_p` is a share of what `top_k` leaves.

    Tensors:
        chances  [N, V]  f64
        ->       [N, V]  f64
    """
    size = chances.shape[1]
    if is_sorted_whole:
        ordered = chances.sort(dim=-1, descending=True).values
    else:
        counts = [min(answer.parameters.top_k or size, size) for answer in answers]
        ordered = chances.topk(max(counts), dim=-1).values
        is_beyond = torch.arange(ordered.shape[1], device=chances.device) >= _column(chances, counts)
        ordered = ordered.masked_fill_(is_beyond, 0.0)
    if any(answer.parameters.top_p < 1.0 for answer in answers):
        share = _column(chances, (one.parameters.top_p if one.parameters.top_p < 1.0 else ALL for one in answers))
        before = ordered.cumsum(dim=-1) - ordered
        is_in = before < share * ordered.sum(dim=-1, keepdim=True)  # the likeliest always is
        ordered = torch.where(is_in, ordered, 0.0)
    num_kept = (ordered > 0).sum(dim=-1, keepdim=True).clamp_(min=1)
    least = ordered.gather(1, num_kept - 1)
    is_equal = chances == least
    num_more = (chances > least).sum(dim=-1, keepdim=True)
    is_first = is_equal & (is_equal.cumsum(dim=-1, dtype=torch.int32) <= num_kept - num_more)
    return torch.where((chances > least) | is_first, chances, 0.0)


def _has_top_k(answer: Answer, size: int) -> bool:
    return 0 < answer.parameters.top_k < size


def _has_top_p(answer: Answer, size: int) -> bool:
    return not _has_top_k(answer, size) and answer.parameters.top_p < 1.0


def _is_whole(answer: Answer, size: int) -> bool:
    return not _has_top_k(answer, size) and not _has_top_p(answer, size)


def _banned(answer: Answer, end_of_sequence: Collection[int]) -> tuple[int, ...]:
    """Return the tokens that would end an answer before it has the length that was asked for."""
    parameters = answer.parameters
    if answer.num_generated >= parameters.min_tokens:
        return ()
    return (*end_of_sequence, *parameters.stop_token_ids)


def _logprobs(logits: Tensor, tokens: Tensor, wanted: int) -> tuple[Tensor, ...]:
    """Work out how likely each token was, its rank, and what else was likely.

    Tensors:
        logits  [N, V]  f32
        tokens  [N]     i64
        ->      [N], [N], [N, n], [N, n]  any  log probability, rank, the likeliest tokens and theirs
    """
    every = torch.log_softmax(logits, dim=-1)
    value = every.gather(1, tokens[:, None])
    rank = (every > value).sum(dim=-1) + 1
    top = every.topk(min(wanted, every.shape[1]), dim=-1)
    return value.squeeze(1), rank, top.indices, top.values


def _whole(like: Tensor, numbers: Iterable[int]) -> Tensor:
    """Return numbers beside a tensor.

    Tensors:
        ->  [N]  i64
    """
    return on_device(array("q", numbers), like.device)


def _column(like: Tensor, numbers: Iterable[float]) -> Tensor:
    """Return a number a row.

    Tensors:
        ->  [N, 1]  f64
    """
    return on_device(array("d", numbers), like.device)[:, None]
