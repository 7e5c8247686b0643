"""Decisions that a model takes from sizes: right at every size, or refused with the line; never silently wrong."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import assert_serves, compile_case, rows
from piecework.errors import GuardError, ShapeOutOfRange
from piecework.values.shapes import Range

ops = torch.ops.cases
HERE = re.escape(__file__)


class BranchOnRange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x * 2) if x.shape[0] > 16 else x + 1


class BranchOnBothEnds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if 16 < x.shape[0] <= 100 else x + 1


class BranchOnOneSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 64 else ops.fresh(x)


class BranchOnDivisibility(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 8 == 0 else x + 1


class TableOfTiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tiles = {8: 2.0, 64: 3.0, 512: 5.0, 1 << 20: 7.0}

    def forward(self, x: Tensor) -> Tensor:
        for limit, tile in self.tiles.items():
            if x.shape[0] <= limit:
                return ops.fresh(x * tile)
        raise AssertionError("no tile")


class OneMeansSomething(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x.sum(1), 0) if x.shape[0] != 1 else x.sum(1) * 10


class OneOrMoreThanOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x) if x.shape[0] > 1 else x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.inner(x).sum(1), 0) + ops.fresh(x).mean()


class ScatteredRows(nn.Module):
    """Pads rows to quarters, and later infers from a shape whether it did."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        quarter = (n + 3) // 4
        h = torch.cat([x, x.new_zeros(quarter * 4 - n, 4)]).view(4, quarter, 4).sum(0)
        h = ops.fresh(h)
        if h.shape[0] != n:
            h = h.repeat(4, 1)[:n]
        return h


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0] // 2, 2, 4).sum(1)


class Iterates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x[0]
        for row in range(x.shape[0]):
            total = total + x[row]
        return total


SERVED = [
    BranchOnRange, BranchOnBothEnds, BranchOnOneSize, TableOfTiles, OneMeansSomething, OneOrMoreThanOne, Plain,
    ScatteredRows,
]  # fmt: skip
AROUND = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 101, 300, 512, 513)


@pytest.mark.parametrize("model", SERVED, ids=lambda model: model.__name__)
def test_each_size_takes_its_own_branch(model: type[nn.Module]) -> None:
    assert_serves(model(), rows, sizes=AROUND)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [BranchOnBothEnds, OneMeansSomething, ScatteredRows], ids=lambda model: model.__name__
)
def test_each_size_takes_its_own_branch_when_compiled(model: type[nn.Module]) -> None:
    options = {"ranges": ((1, 101),), "max_num_batched_tokens": 101}
    assert_serves(model(), rows, compiler="inductor", sizes=(1, 2, 7, 16, 17, 64, 65, 101), options=options)


@pytest.mark.parametrize("first", [0, 1, 2, 300])
def test_the_caller_s_first_batch_is_not_the_trace_s(first: int) -> None:
    program = compile_case(Plain(), (torch.rand(first, 4),))
    model = Plain()
    model.load_state_dict(program.weights)
    for size in (1, 2, 8, 65):
        x = rows(size)[0]
        with torch.no_grad():
            assert torch.equal(program(x), model(x))


def test_sides_are_found_again_warm() -> None:
    store, model = pw.MemoryStore(), TableOfTiles()
    cold = compile_case(model, rows(5), store=store)
    warm = pw.load(store, key=cold.key, weights={})
    assert len(cold.sides) == len(warm.sides) == 4
    for size in AROUND:
        x = rows(size)[0]
        assert torch.equal(warm(x), model(x))


def test_what_no_range_can_hold_is_refused_with_the_line() -> None:
    with pytest.raises(GuardError, match=r"right only where `\(tokens % 8\) != 0`") as raised:
        compile_case(BranchOnDivisibility(), rows(5))
    assert re.match(rf"{HERE}:\d+ \(return x \* 2 if x.shape\[0\] % 8 == 0 else x \+ 1\)", raised.value.facts["line"])
    assert "opaque operator" in raised.value.hint and "pad sizes to a ladder" in raised.value.hint


def test_a_short_range_is_cut_even_for_divisibility() -> None:
    options = {"ranges": ((1, 12),), "max_num_batched_tokens": 12}
    assert_serves(BranchOnDivisibility(), rows, sizes=range(1, 13), options=options)


def test_splitting_can_be_switched_off() -> None:
    with pytest.raises(GuardError, match="splitting at it is switched off") as raised:
        compile_case(BranchOnRange(), rows(5), options={"split_at_guards": False})
    assert raised.value.facts["expression"] in ("tokens <= 16", "16 >= tokens")
    assert re.match(HERE, raised.value.facts["line"])


@pytest.mark.parametrize("model", [Iterates, Divides], ids=lambda model: model.__name__)
def test_a_dimension_that_the_model_fixes_is_an_error_with_the_line(model: type[nn.Module]) -> None:
    with pytest.raises(GuardError) as raised:
        compile_case(model(), rows(6))
    line = str(raised.value.facts.get("line", ""))
    assert re.search(rf"{HERE}:\d+", raised.value.message + line)


def test_sizes_outside_raise_by_name() -> None:
    program = compile_case(Plain(), rows(5), options={"ranges": ((1, 64),), "max_num_batched_tokens": 64})
    for size in (0, 65):
        with pytest.raises(ShapeOutOfRange, match=f"dimension `tokens` is `{size}`; the program serves `1` to `64`"):
            program(*rows(size))


def test_two_names_that_must_agree_are_refused_and_one_name_is_served() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ops.fresh(x) + y

    def make(size: int) -> tuple[Tensor, Tensor]:
        return torch.rand(size, 4), torch.rand(size, 4)

    with pytest.raises(GuardError, match=r"`tokens == others`|`others == tokens`") as raised:
        compile_case(Sum(), make(5), dynamic={"x": {0: "tokens"}, "y": {0: "others"}})
    assert "give dimensions that always agree one name" in raised.value.hint
    program = assert_serves(Sum(), make, dynamic={"x": {0: "tokens"}, "y": {0: "tokens"}})
    said = r"dimension `tokens` is `5` at `x.shape\[0\]` and `6` at `y.shape\[0\]`"
    with pytest.raises(pw.errors.InputError, match=said):
        program(torch.rand(5, 4), torch.rand(6, 4))


def test_two_free_names_are_served() -> None:
    class Outer(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ops.fresh(x @ y.T).sum(0) + y.shape[0] - x.shape[0]

    assert_serves(
        Outer(), lambda size: (torch.rand(size, 4), torch.rand(3 * size % 11 + 1, 4)),
        dynamic={"x": {0: "tokens"}, "y": {0: "rows"}},
    )  # fmt: skip


class ReadsASizeAlone(nn.Module):
    """Branches on the size of an input that it computes nothing with."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if y.shape[0] > 16 else ops.fresh(x)


class ReadsNoTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[0]) * 2 if x.shape[0] > 16 else torch.ones(3)


class ComparesTwo(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x.shape[0] * y.shape[0] > 100 else x + 1


def test_a_size_of_an_input_that_is_not_read_splits_too() -> None:
    def make(size: int) -> tuple[Tensor, Tensor]:
        return torch.rand(3, 4), torch.rand(size, 4)

    assert len(assert_serves(ReadsASizeAlone(), make, sizes=AROUND, dynamic={"y": {0: "tokens"}}).sides) == 2
    assert len(assert_serves(ReadsNoTensor(), rows, sizes=AROUND).sides) == 2


def test_two_sizes_of_which_one_input_is_not_read_are_refused_with_the_line() -> None:
    names = {"x": {0: "tokens"}, "y": {0: "rows"}}
    with pytest.raises(GuardError, match=r"`rows\*tokens > 100`|`rows\*tokens <= 100`") as raised:
        compile_case(ComparesTwo(), (*rows(5), *rows(7)), dynamic=names)
    assert re.match(HERE, raised.value.facts["line"])


@pytest.mark.parametrize("kind", ["backed", "oblivious", "unbacked"])
def test_each_kind_of_dimension(kind: str) -> None:
    assert_serves(Plain(), rows, dynamic={"x": {-2: pw.Dim("tokens", kind)}})


def test_an_unbacked_dimension_takes_no_branch() -> None:
    with pytest.raises(pw.errors.TraceError, match=rf"{HERE}:\d+") as raised:
        compile_case(BranchOnRange(), rows(5), dynamic={"x": {0: pw.Dim("tokens", "unbacked")}})
    assert "torch.where" in raised.value.hint


def test_a_dimension_s_own_bounds_are_kept() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.rand(9, 4))

        def forward(self, x: Tensor) -> Tensor:
            return ops.fresh(x) + self.table[: x.shape[0]]

    program = assert_serves(Positions(), rows, sizes=(1, 2, 9), dynamic={"x": {0: pw.Dim("tokens", high=9)}})
    assert program.bound is not None and program.bound.checked.bounds == {"tokens": Range(1, 9)}
    with pytest.raises(ShapeOutOfRange, match="serves `1` to `9`"):
        program(*rows(10))
