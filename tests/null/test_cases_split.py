"""What crosses a cut, in every spelling: each model gives what it gives uncompiled, at every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from case_operators import assert_serves, calls, compile_case, rows
from piecework.errors import GuardError, ShapeOutOfRange
from piecework.events import Recorder, SplitDone
from split_models import (
    COMPILED,
    ONE_RANGE,
    SPELLINGS,
    AllocationOnly,
    AssertOnSizes,
    NoneAtAll,
    NothingBetween,
    SizeTuple,
    TwoUsed,
    UnusedEffect,
    ViewsOnly,
)

ops = torch.ops.cases


@pytest.mark.parametrize("model", SPELLINGS, ids=lambda model: model.__name__)
def test_a_cut_changes_nothing(model: type[nn.Module]) -> None:
    assert_serves(model(), rows)


@pytest.mark.slow
@pytest.mark.parametrize("model", COMPILED, ids=lambda model: model.__name__)
def test_a_cut_changes_nothing_when_compiled(model: type[nn.Module]) -> None:
    assert_serves(model(), rows, compiler="inductor", sizes=(1, 2, 65), options=ONE_RANGE)


@pytest.mark.parametrize("model", [SizeTuple, TwoUsed, AllocationOnly, ViewsOnly], ids=lambda model: model.__name__)
@pytest.mark.parametrize("options", [{"merge_consecutive": False}, {"split_ops": (), "split_ops_only": ()}], ids=str)
def test_other_ways_to_cut_change_nothing(model: type[nn.Module], options: dict[str, Any]) -> None:
    assert_serves(model(), rows, options=options)


def test_a_size_at_which_the_model_itself_fails_is_named() -> None:
    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(64, 4)[x.shape[0] : 2 * x.shape[0]]

    with pytest.raises(
        GuardError, match=r"does not trace at sizes `tokens 33-8192`.*test_cases_split.py:\d+"
    ) as raised:
        compile_case(Tail(), rows(5))
    assert raised.value.hint.startswith("give `tokens` the largest size 32")
    program = assert_serves(
        Tail(), rows, sizes=(1, 2, 7, 32), options={"ranges": ((1, 32),), "max_num_batched_tokens": 32}
    )
    with pytest.raises(ShapeOutOfRange, match="`tokens` is `33`; the program serves `1` to `32`"):
        program(*rows(33))


def test_an_assertion_about_data_dependent_sizes() -> None:
    def make(size: int) -> tuple[Tensor, Tensor]:
        return (*rows(size), torch.tensor([size // 2, 0, size - size // 2]))

    assert_serves(AssertOnSizes(), make)


def test_a_write_that_looks_dead_is_made() -> None:
    model = UnusedEffect()
    program = compile_case(model, rows(5))
    calls.clear()
    program(*rows(7))
    assert calls == ["put 7"]


def shape_of(model: nn.Module, **options: Any) -> SplitDone:
    recorder = Recorder()
    compile_case(model, rows(5), options=options, observer=recorder)
    return recorder.of(SplitDone)[0]


def test_what_only_allocates_or_views_is_no_piece() -> None:
    assert shape_of(AllocationOnly()).sites == 1
    assert shape_of(ViewsOnly()).sites == 1
    assert shape_of(NothingBetween()).sites == 0
    assert (shape_of(NothingBetween()).regions, shape_of(NothingBetween(), merge_consecutive=False).regions) == (1, 2)
    assert shape_of(NoneAtAll()).regions == shape_of(TwoUsed(), split_ops=(), split_ops_only=()).regions == 1
