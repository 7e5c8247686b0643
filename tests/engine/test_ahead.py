"""Steps that run ahead of their tokens give what steps that wait for them give, and lose no page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.counting import VOCABULARY, Adding, drain, expected, request, served, small_engine, tokens
from piecework.engine.loop import Engine, runs_ahead
from piecework.engine.options import EngineOptions
from piecework.engine.readback import read_back
from piecework.engine.sequence import Output


class Spread(Adding):
    """Gives every token a chance of its own, which follows from all tokens so far."""

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        best = super().__call__(input_ids, position_ids, rows).argmax(dim=-1, keepdim=True)
        return -((torch.arange(VOCABULARY) * 7 + best * 5) % VOCABULARY).float() / 4


PARAMETERS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 14), "temperature": st.sampled_from([0.0, 0.0, 1.0, 3.0]), "seed": st.integers(0, 9)},
    optional={
        "top_k": st.integers(1, 70), "top_p": st.sampled_from([0.3, 0.9]), "min_p": st.just(0.2),
        "presence_penalty": st.just(1.5), "frequency_penalty": st.just(0.7), "repetition_penalty": st.just(1.8),
        "stop_token_ids": st.lists(st.integers(3, 63), max_size=9).map(tuple), "logprobs": st.integers(0, 3),
        "n": st.integers(1, 3), "ignore_eos": st.booleans(),
    },
)  # fmt: skip
REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=17), PARAMETERS, st.integers(0, 4)),
    min_size=1, max_size=7,
)  # fmt: skip


def serve(step_ahead: str, asked: list[Any], pages: int, aborted: dict[int, int]) -> tuple[dict[Any, Any], Engine]:
    """Answer requests that come at their steps; return the answers, those that were aborted without their ends."""
    options = EngineOptions(
        max_num_sequences=4, max_num_batched_tokens=9, page_size=4, num_pages=pages, step_ahead=step_ahead
    )
    engine = Engine(served(Spread(), end_of_sequence=frozenset({5, 50})), options)
    found: dict[Any, list[Output]] = {}
    waiting = [(name, *one) for name, one in enumerate(asked)]
    for step in range(2000):
        coming = waiting if not engine.has_work else [each for each in waiting if each[3] <= step]
        for name, prompt, parameters, _ in coming:
            engine.submit(request(str(name), prompt, **parameters))
        waiting = [each for each in waiting if each not in coming]
        if not engine.has_work and not waiting:
            break
        for name in [name for name, at in aborted.items() if at == step]:
            engine.abort(str(name))
        for output in engine.step():
            found.setdefault((output.request_id, output.index), []).append(output)
    assert engine.pool.num_held == 0 and not engine.has_work
    return {key: [(o.token_ids, o.finish_reason, o.stop_reason, o.logprobs) for o in each]
            for key, each in found.items()}, engine  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(9, 24), st.dictionaries(st.integers(0, 6), st.integers(0, 12), max_size=2))
def test_answers_are_those_of_steps_that_wait(asked: list[Any], pages: int, aborted: dict[int, int]) -> None:
    waited, _ = serve("off", asked, pages, {})
    ahead, engine = serve("on", asked, pages, aborted)
    for key, outputs in ahead.items():
        if outputs[-1][1] == "abort":
            assert outputs[:-1] == waited[key][: len(outputs) - 1]
        else:
            assert outputs == waited[key]
    assert engine.status.num_generated_tokens == sum(len(one[0]) for each in ahead.values() for one in each)
    if not aborted:
        assert ahead.keys() == waited.keys()


def test_a_step_is_launched_before_the_tokens_of_the_last_are_told() -> None:
    model = Adding()
    engine = small_engine(model, step_ahead="on")
    engine.submit(request("a", [1, 2, 3], max_tokens=3))
    told = []
    while engine.has_work:
        outputs = engine.step()
        told.append((len(model.steps), [t for each in outputs for t in each.token_ids]))
    first, second, third = expected([1, 2, 3], 3)
    # The last token that may come is known to be the last: no step is launched behind it.
    assert told == [(1, []), (2, [first]), (3, [second]), (3, [third])]


def test_a_row_behind_an_end_is_thrown_away_and_its_pages_serve_the_next() -> None:
    answer = expected([1, 2], 8)
    model = Adding()
    engine = small_engine(model, step_ahead="on", num_pages=2)
    engine.submit(request("ends", [1, 2], max_tokens=6, stop_token_ids=(answer[2],)))
    engine.submit(request("next", [4, 5, 6], max_tokens=4))
    found = drain(engine)
    assert tokens(found["ends", 0]) == answer[:3] and found["ends", 0][-1].finish_reason == "stop"
    assert tokens(found["next", 0]) == expected([4, 5, 6], 4)
    assert engine.pool.num_held == 0


def test_an_abort_while_tokens_are_on_their_way_tells_none_of_them() -> None:
    engine = small_engine(step_ahead="on")
    engine.submit(request("a", [1, 2, 3], max_tokens=9))
    engine.submit(request("b", [1, 2], max_tokens=9))
    engine.step()
    engine.abort("a")
    found = drain(engine)
    assert [(each.token_ids, each.finish_reason) for each in found["a", 0]] == [((), "abort")]
    assert tokens(found["b", 0]) == expected([1, 2], 9)


@pytest.mark.parametrize(
    ("step_ahead", "device", "others", "runs"),
    [("auto", "cpu", None, False), ("auto", "cuda:1", None, True), ("off", "cuda", None, False),
     ("on", "cpu", None, True), ("on", "cuda", object(), False)],
)  # fmt: skip
def test_who_runs_ahead(step_ahead: str, device: str, others: Any, runs: bool) -> None:
    assert runs_ahead(EngineOptions(step_ahead=step_ahead), device, others) is runs


def test_what_lies_on_the_host_is_read_as_it_is() -> None:
    given = torch.arange(3), torch.ones(2)
    assert all(a is b for a, b in zip(read_back(given)(), given, strict=True)) and read_back(())() == []
