"""Ranks that follow run what rank 0 runs; a step that fails on all is left, one that fails on some ends all."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import piecework as pw
from engine.counting import expected
from parallel.following import CAPTURING, PROMPTS, answer, ask_all, capture, fail, generate
from parallel.several_ranks import on_ranks
from piecework.api.folder import build_folder
from piecework.api.serving import open_engine, serving_options
from piecework.engine.packed import pack_step, unpack_step
from piecework.engine.sequence import SamplingParameters
from piecework.ops import Step
from tiny_models import tiny_folder

ANSWERS = [expected(prompt, 12) for prompt in PROMPTS]
NUMBERS = st.integers(0, 2**31 - 1)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
@given(
    sequences=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9), st.lists(NUMBERS, max_size=4)), min_size=1),
    padding=st.integers(0, 3),
    function=st.integers(0, 99),
    data=st.data(),
)
def test_a_step_arrives_as_it_was(
    sequences: list[tuple[int, int, list[int]]], padding: int, function: int, data: st.DataObject
) -> None:
    counts = [count for count, _, _ in sequences]
    total = sum(counts)
    slots = data.draw(st.lists(NUMBERS, min_size=total, max_size=total))
    starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
    step = Step.from_lists(
        slots=slots,
        query_starts=starts,
        sequence_lengths=[count + before for count, before, _ in sequences],
        page_table=[pages for _, _, pages in sequences],
        sites={},
        num_padded=total + padding,
    )
    ids = torch.randint(0, 2**31 - 1, (1, total + padding))
    positions, rows = torch.arange(total + padding)[None], torch.tensor([total - 1, total - 1])
    found = unpack_step(pack_step(function, ids, positions, rows, step), {"site": 1}, "cpu")
    assert (found.function, found.step.num_tokens, found.step.sites) == (function, total, {"site": 1})
    assert found.is_decode == all(count == 1 for count in counts)
    pairs = [(found.input_ids, ids), (found.position_ids, positions), (found.rows, rows)]
    pairs += [
        (getattr(found.step, name), getattr(step, name))
        for name in ("slots", "query_starts", "sequence_lengths", "page_table")
    ]
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)


def test_every_rank_runs_every_step() -> None:
    (found, steps), *others = on_ranks(3, answer, 3)
    assert found == ANSWERS
    assert others == [steps, steps]


def test_a_tier_that_fails_on_all_ranks_is_left_on_all() -> None:
    (found, trouble, by_tier), steps = on_ranks(2, fail, (0, 1), True)
    assert found == ANSWERS
    assert trouble == "tier 1: ValueError: a kernel is wrong"
    assert (by_tier[1], by_tier[0] > 0) == (2, True)
    assert steps == sum(by_tier) + 1, "the step that failed was run again"


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tier_that_fails_on_one_rank_ends_all(rank: int, before: bool) -> None:
    found = on_ranks(2, fail, (rank,), before)
    told = [each["message"] for each in found if isinstance(each, dict)]
    assert all(each["error"] == "ParallelError" for each in found if isinstance(each, dict)), found
    assert any(f"a step failed on rank {rank} and not on" in message for message in told), found
    assert not any(each in (0, -signal.SIGKILL) for each in found if isinstance(each, int))


def test_sampled_answers_of_several_prompts_are_equal_on_all_ranks(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path / "model")
    parameters = [
        SamplingParameters(max_tokens=9, ignore_eos=True, logprobs=2),
        SamplingParameters(max_tokens=7, ignore_eos=True, temperature=1.3, n=2),  # no seed: rank 0 draws one
        SamplingParameters(max_tokens=5, temperature=0.7, seed=3, stop_token_ids=(4,)),
    ]
    one, other = on_ranks(2, generate, folder, tmp_path / "store", parameters)
    assert (one[0], one[2]) == (other[0], other[2])
    (first, second), told, greedy, _ = one
    assert other[1] == f"rank 0, answering: {told}"
    assert [len(each["token_ids"]) for each in first[:3]] == [9, 7, 7]
    assert first[0] == second[0] and first[3] == second[3] and first[1] != second[1]
    assert len(first[0]["logprobs"]) == 9 and len(first[0]["logprobs"][0]["top"]) == 2
    assert "a prompt with its answer may have" in told
    assert greedy[0] == list(first[0]["token_ids"][:4])
    (alone,) = on_ranks(1, generate, folder, tmp_path / "store", parameters)
    assert [each["token_ids"] for each in alone[0][0]][::3] == [each["token_ids"] for each in first][::3]


def test_sizes_are_captured_on_all_ranks_and_replayed_by_all(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path / "model")
    alone = open_engine(folder, engine=replace(CAPTURING, enforce_eager=True))
    wanted = ask_all(alone)
    settings = serving_options(pw.CompileOptions(compiler="eager", tensor_parallel_size=2), CAPTURING)
    build_folder(folder, options=settings, store=pw.DiskStore(tmp_path / "store"))
    (before, after, tier, trouble, replayed), others = on_ranks(2, capture, folder, tmp_path / "store")
    assert before == after == wanted
    assert (tier, trouble) == (2, "")
    sizes, counts = replayed
    assert sizes == [("decode", 2), ("decode", 4)] and counts["decode", "piecewise"] > 8
    assert others == replayed, "both captured and replayed the same"
