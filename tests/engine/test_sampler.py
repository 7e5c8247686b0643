"""Sampling: what each parameter leaves in, and the same tokens whoever else is in the batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine.counting import drain, request, small_engine, tokens
from piecework.engine.sampler import choose
from piecework.engine.sequence import Sequence

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))


def answer(seed: int = 0, prompt: tuple[int, ...] = (1,), said: tuple[int, ...] = (), **parameters: object) -> Sequence:
    made = Sequence(request("r", list(prompt), **parameters), 0, 0, seed)
    for token in said:
        made.append(token)
    return made


def drawn(count: int = 600, **parameters: object) -> Counter[int]:
    """Draw many first tokens, each with a seed of its own."""
    rows = [answer(seed, **{"temperature": 1.0, **parameters}) for seed in range(count)]
    return Counter(each.token_id for each in choose(LOGITS.expand(count, 5), rows, ()))


def test_tokens_come_as_often_as_they_are_likely() -> None:
    found = drawn(4000)
    for token, probability in enumerate([0.4, 0.3, 0.15, 0.1, 0.05]):
        assert abs(found[token] / 4000 - probability) < 4 * math.sqrt(probability * (1 - probability) / 4000)


@pytest.mark.parametrize(
    ("parameters", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"temperature": 0.01}, {0}),
        ({"temperature": 0.0}, {0}),
    ],
)
def test_what_each_parameter_leaves_in(parameters: dict[str, float], left: set[int]) -> None:
    assert set(drawn(**parameters)) == left


def test_penalties_lower_what_was_said() -> None:
    def best(**parameters: object) -> int:
        return choose(LOGITS[None], [answer(**parameters)], ())[0].token_id  # type: ignore[arg-type]

    assert best() == 0
    assert best(said=(0,), presence_penalty=0.2) == 0
    assert best(said=(0,), presence_penalty=0.4) == 1
    assert best(said=(0, 0), frequency_penalty=0.2) == 1
    assert best(prompt=(0,), presence_penalty=2.0) == 0, "presence counts what was said, not the prompt"
    assert best(prompt=(0,), repetition_penalty=1.5) == 1, "repetition counts the prompt too"


def test_an_answer_that_is_too_short_does_not_end() -> None:
    short = answer(min_tokens=1, stop_token_ids=(1,))
    assert choose(LOGITS[None], [short], {0})[0].token_id == 2
    long = answer(said=(3,), min_tokens=1, stop_token_ids=(1,))
    assert choose(LOGITS[None], [long], {0})[0].token_id == 0


def test_log_probabilities_are_those_of_the_model_with_their_ranks() -> None:
    (found,) = choose(LOGITS[None] * 1.0, [answer(said=(0,), presence_penalty=2.0, logprobs=2)], ())
    assert found.logprobs is not None
    assert (found.token_id, found.logprobs.rank) == (1, 2)
    assert found.logprobs.logprob == pytest.approx(math.log(0.3), abs=1e-5)
    assert [token for token, _ in found.logprobs.top] == [0, 1]
    assert choose(LOGITS[None], [answer(logprobs=0)], ())[0].logprobs is not None
    assert choose(LOGITS[None], [answer()], ())[0].logprobs is None


def test_a_row_that_holds_no_number_ends_in_some_token() -> None:
    broken = torch.full((1, 5), float("nan"))
    assert 0 <= choose(broken, [answer(temperature=1.0, top_p=0.5)], ())[0].token_id < 5


def test_a_seed_gives_the_same_answer_alone_in_company_and_after_it_was_sent_back() -> None:
    def ask(name: str) -> object:
        return request(name, [1, 2, 3], max_tokens=8, temperature=5.0, seed=7, n=2)

    alone = small_engine()
    alone.submit(ask("a"))  # type: ignore[arg-type]
    first = drain(alone)
    crowd = small_engine(num_pages=7, share_prefixes=False)
    for number in range(3):
        crowd.submit(request(f"x{number}", [9, 8, 7, 6], max_tokens=9, temperature=5.0))
    crowd.submit(ask("a"))  # type: ignore[arg-type]
    second = drain(crowd)
    assert crowd.status.num_preempted > 0
    for index in range(2):
        assert tokens(first["a", index]) == tokens(second["a", index])
    assert tokens(first["a", 0]) != tokens(first["a", 1])


def test_without_a_seed_answers_differ() -> None:
    engine = small_engine()
    for number in range(3):
        engine.submit(request(f"r{number}", [1, 2], max_tokens=9, temperature=9.0))
    assert len({tuple(tokens(each)) for each in drain(engine).values()}) == 3
