"""Sizes that a model asks for without naming them: ranks after a squeeze, ends of slices, views that are copies."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from case_operators import assert_serves, compile_case, rows
from piecework.errors import GuardError, TraceError

Forward = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.inner = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def branch_on_rank(x: Tensor) -> Tensor:
    return x + 1 if x.squeeze(0).dim() == 1 else x * 2


def number_from_rank(x: Tensor) -> Tensor:
    return x * len(x.unsqueeze(1).squeeze().shape) + torch.squeeze(x.unsqueeze(2), dim=(0, 2)).ndim


def squeeze_of_slice(x: Tensor) -> Tensor:
    return x[x.shape[0] - 5 :].squeeze(0) * 2


def write_to_reshaped(x: Tensor) -> Tensor:
    y = x * 2
    y.t().reshape(-1).add_(1)
    y[:, :2].contiguous().mul_(3)
    return y


def end_that_may_be_negative(x: Tensor) -> Tensor:
    return x[: x.shape[0] - 5].sum(0) + x


def size_alone(x: Tensor) -> Tensor:
    return torch.ones(max(x.shape[0] - 5, 0), 4) + torch.arange(x.shape[0] - 5, x.shape[0])[:4]


def loop_over_few_rows(x: Tensor) -> Tensor:
    return torch.stack([row * number for number, row in enumerate(x)])


FORWARDS = [
    branch_on_rank, number_from_rank, squeeze_of_slice, write_to_reshaped, end_that_may_be_negative, size_alone,
    loop_over_few_rows,
]  # fmt: skip


def _options(forward: Forward) -> dict[str, object]:
    return {"max_num_batched_tokens": 8 if forward is loop_over_few_rows else 16}


def _sizes(forward: Forward) -> tuple[int, ...]:
    return (
        (1, 2, 5, 8) if forward is loop_over_few_rows else (4, 5, 6, 16) if forward is size_alone else (1, 2, 5, 6, 16)
    )


@pytest.mark.parametrize("forward", FORWARDS)
def test_each_size_is_served_as_uncompiled(forward: Forward) -> None:
    assert_serves(Model(forward), rows, sizes=_sizes(forward), options=_options(forward))


@pytest.mark.slow
@pytest.mark.parametrize("forward", FORWARDS[:2])
def test_each_size_is_served_as_uncompiled_when_compiled(forward: Forward) -> None:
    assert_serves(Model(forward), rows, sizes=_sizes(forward), compiler="inductor", options=_options(forward))


def test_a_squeeze_of_a_size_known_at_run_time_only_is_refused_unless_the_dimension_is_named() -> None:
    def all_dimensions(x: Tensor) -> Tensor:
        return x[(x[:, 0] > 1).nonzero().squeeze()].sum(0)

    def one_dimension(x: Tensor) -> Tensor:
        return x[(x[:, 0] > 1).nonzero().squeeze(1)].sum(0)

    with pytest.raises(GuardError, match=r"only where `u0 != 1` \(at .*test_cases_hidden_sizes.py:\d+ \(return x"):
        compile_case(Model(all_dimensions), rows(5))
    assert_serves(Model(one_dimension), rows, sizes=(1, 2, 16))


def test_more_sizes_than_may_be_traced_are_refused_with_the_line() -> None:
    with pytest.raises(GuardError, match="the model fixes it to `7` at .*test_cases_hidden_sizes.py"):
        compile_case(Model(loop_over_few_rows), rows(5), options={"max_num_batched_tokens": 9})


class AsksOnce(nn.Module):
    @functools.cached_property
    def limit(self) -> int:
        return 6

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > self.limit else x + 1


def test_a_property_that_is_computed_once_is_named_until_it_was_asked_for() -> None:
    model = AsksOnce()
    if sys.version_info < (3, 12):  # until then Python takes a lock for it, which no tracer enters
        with pytest.raises(TraceError, match="a `functools.cached_property` is asked for the first time") as raised:
            compile_case(model, rows(5))
        assert "ask for the property once before compiling" in raised.value.hint
    assert model.limit == 6
    assert_serves(model, rows, sizes=(1, 6, 7, 16))


def test_a_size_compared_by_identity_with_a_number_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "by_identity.py"
    file.write_text("def forward(x):\n    return x + 1 if x.shape[0] is not 4 else x * 2\n")
    space: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the interpreter itself warns of it
        exec(compile(file.read_text(), str(file), "exec"), space)
    with pytest.raises(TraceError, match=r"compares with the number `4` by identity at .*by_identity.py:2"):
        compile_case(Model(space["forward"]), rows(5))
