"""Numbers that a model computes from sizes: what Python computes at every size, or refused with the line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from case_operators import assert_same, assert_serves, compile_case, rows
from piecework.errors import GuardError, TraceError

ops = torch.ops.cases
HERE = re.escape(__file__)
HIGH = 80
OPTIONS = {"ranges": ((1, HIGH),), "max_num_batched_tokens": HIGH}
Forward = Callable[[Any, Tensor], Any]


def model(forward: Forward) -> nn.Module:
    return type("Made", (nn.Module,), {"forward": forward})()  # type: ignore[no-any-return]


VALUES: dict[str, Forward] = {
    "int": lambda self, x: ops.fresh(x[: int(x.shape[0] * 0.3) + 1]) * 2,
    "round": lambda self, x: x * round(x.shape[0] / 2),
    "round to a digit": lambda self, x: x * round(x.shape[0] / 3, 1),
    "ceil": lambda self, x: x.new_zeros(math.ceil(x.shape[0] / 16), 4),
    "floor": lambda self, x: x * math.floor(x.shape[0] / 7),
    "trunc": lambda self, x: ops.fresh(x) * math.trunc(-x.shape[0] / 7),
    "tensor of a list": lambda self, x: x * torch.tensor([x.shape[0] / 2, 1.0, 2.0, 3.0]),
    # To a symbolic expression this is `1.0 * n`; Python's product is below a whole number at some sizes.
    "constants that fold": lambda self, x: x.double() * (x.shape[0] * 0.7 * 10) + int(x.shape[0] * 1.1 * 10),
    "sum of floats": lambda self, x: x.double() * sum([x.shape[0] / 2, 0.1, 0.2]),
    "floor division by a float": lambda self, x: x * (x.shape[0] // 0.3),
    "root": lambda self, x: x.double() * x.shape[0] ** -0.5,
    "sine": lambda self, x: x.double() * math.sin(x.shape[0]),
    "larger": lambda self, x: x * max(x.shape[0] / 2, 8.5),
    "quotient and rest": lambda self, x: ops.fresh(x) * divmod(x.shape[0], 7)[0] - divmod(x.shape[0] * 0.5, 3)[1],
}


@pytest.mark.parametrize("forward", VALUES.values(), ids=VALUES)
def test_a_number_is_what_python_computes_at_every_size(forward: Forward) -> None:
    program = assert_serves(model(forward), rows, sizes=range(1, HIGH + 1), options=OPTIONS)
    assert len(program.sides) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int", "round", "trunc", "tensor of a list", "larger"])
def test_a_number_is_what_python_computes_when_compiled(name: str) -> None:
    assert_serves(model(VALUES[name]), rows, compiler="inductor", sizes=(1, 2, 7, 16, 33, HIGH), options=OPTIONS)


BRANCHES: dict[str, Forward] = {
    "root": lambda self, x: x * 2 if x.shape[0] ** 0.5 > 4 else x + 1,
    "root of math": lambda self, x: x * 2 if math.sqrt(x.shape[0]) >= 5 else x + 1,
    "logarithm": lambda self, x: x * 2 if math.log2(x.shape[0]) > 5 else x + 1,
    "quotient": lambda self, x: x * 2 if x.shape[0] / 3 > 5 else x + 1,
    # 3 * 0.1 * 10 is 3.0000000000000004.
    "constants that fold": lambda self, x: x * 2 if x.shape[0] * 0.1 * 10 > 3 else x + 1,
    "rounded twice": lambda self, x: x * 2 if x.shape[0] / 49 * 49 < 49 else x + 1,
    "whole of a float": lambda self, x: x * 2 if int(x.shape[0] * 0.7 * 10) >= 77 else x + 1,
}


@pytest.mark.parametrize("forward", BRANCHES.values(), ids=BRANCHES)
def test_a_branch_on_a_float_is_python_s_at_every_size(forward: Forward) -> None:
    assert_serves(model(forward), rows, sizes=range(1, HIGH + 1), options=OPTIONS)


RESULTS: dict[str, Forward] = {
    "shape": lambda self, x: (x * 2, x.shape),
    "size of a slice": lambda self, x: {"y": ops.fresh(x), "size": x[1:].size()},
    "sizes in other order": lambda self, x: (x * 2, torch.Size([x.shape[1], x.shape[0]])),
    "numbers": lambda self, x: (x * 2, x.shape[0], x.shape[0] * 2 + 1),
}


@pytest.mark.parametrize("forward", RESULTS.values(), ids=RESULTS)
def test_a_size_in_the_result_is_the_call_s(forward: Forward) -> None:
    program = compile_case(model(forward), rows(5), options=OPTIONS)
    for size in (1, 2, 13, HIGH):
        (x,) = rows(size)
        assert_same(program(x), model(forward)(x))


REFUSED: dict[str, tuple[Forward, type[Exception], str]] = {
    "parts of other sizes": (
        lambda self, x: [ops.fresh(part) for part in x.tensor_split(3)],
        GuardError,
        r"right only where `.*tokens % 3.*` \(at {}:\d+",
    ),
    "number of NumPy": (
        lambda self, x: x * int(numpy_number()),
        TraceError,
        r"the model computes with a number at {}:\d+ that is read from no tensor of its inputs",
    ),
    "text of a size": (
        lambda self, x: x * len(f"{x.shape[0]}"),
        GuardError,
        r"is declared dynamic, and the model fixes it to `\d+` at {}:\d+",
    ),
    "float of a size in the result": (
        lambda self, x: (x * 2, x.shape[0] / 2),
        TraceError,
        r"the result of forward at {}:\d+ holds a Python number that depends on a size: `6.5`, then",
    ),
    "data": (
        lambda self, x: setattr_data(x),
        TraceError,
        r"the graph calls `.*`, which has no importable name at {}:\d+",
    ),
}  # fmt: skip
NUMBER = numpy.int64(3)


def numpy_number() -> Any:
    return NUMBER


def setattr_data(x: Tensor) -> Tensor:
    x.data = x.data * 2
    return x + 1


@pytest.mark.parametrize(("forward", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_with_its_line(forward: Forward, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words.format(HERE)) as raised:
        compile_case(model(forward), rows(5), options=OPTIONS)
    assert raised.value.hint  # type: ignore[attr-defined]


def test_a_number_that_may_be_a_size_or_not_is_refused() -> None:
    class OwnSizesOnly(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            return x.view(int(lengths.sum()), 4) * 2, x.shape

    with pytest.raises(TraceError, match="holds the number `5`, which is the size `tokens` or only equal"):
        compile_case(OwnSizesOnly(), (rows(5)[0], torch.tensor([2, 3])))


AS_VALUES: dict[str, Forward] = {
    "index": lambda self, x: x * [2, 3][x.shape[0] > 16],
    "argument": lambda self, x: x.sum(1, keepdim=x.shape[0] > 1),
    "one of many arguments": lambda self, x: x.sort(0, descending=x.shape[0] > 1).values,
}


@pytest.mark.parametrize("forward", AS_VALUES.values(), ids=AS_VALUES)
def test_a_condition_that_the_tracer_takes_for_no_value_is_refused_with_what_to_write(forward: Forward) -> None:
    with pytest.raises(TraceError, match=rf"a condition on a size stands where .* at {HERE}:\d+") as raised:
        compile_case(model(forward), rows(5), options=OPTIONS)
    assert "`1 if … else 0`" in raised.value.hint
    written = model(lambda self, x: x * [2, 3][1 if x.shape[0] > 16 else 0])
    assert len(assert_serves(written, rows, sizes=(1, 2, 16, 17, HIGH), options=OPTIONS).sides) == 2
