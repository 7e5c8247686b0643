"""What a call may not vary: each difference from the trace is named, and compiles nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from case_operators import compile_case, rows
from piecework.errors import InputError
from piecework.values.overlap import is_overlapping

ops = torch.ops.cases


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, mode: str = "extend", alpha: float = 1.0) -> Tensor:
        y = ops.fresh(self.inner(x))
        return y * 2 + alpha if mode == "extend" else y - alpha


class Nested(nn.Module):
    def forward(self, x: Tensor, more: list[Tensor], extra: dict[str, Tensor]) -> Tensor:
        return ops.fresh(x) + more[0] + extra["a"]


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.rand(7, 4).double(), "argument `x` has dtype `float64`, the program was traced with `float32`"),
        (torch.rand(4, 7).t(), "argument `x` has strides `[1, 7]`, the program takes `contiguous`"),
        (torch.rand(7, 5), "argument `x` has size of dimension `1` `5`, the program was traced with `4`"),
        (torch.rand(7, 4, 1), "argument `x` has shape `[7, 4, 1]`"),
        (None, "argument `x` is missing"),
        ([1, 2], "argument `x` is a `list`, not a plain tensor"),
        (torch.rand(7, 4, device="meta"), "argument `x` has device `meta`, the program was traced with `cpu`"),
        (torch.rand(7, 4).to_sparse(), "argument `x` has layout `sparse_coo`, the program takes `strided`"),
    ],
    ids=["dtype", "strides", "size", "rank", "none", "type", "device", "sparse"],
)  # fmt: skip
def test_what_differs_from_the_trace_is_named(x: object, words: str) -> None:
    program = compile_case(Plain(), rows(5))
    with pytest.raises(InputError) as raised:
        program(x)
    assert words in raised.value.message


@pytest.mark.filterwarnings("ignore")  # torch calls both kinds beta
def test_a_tensor_without_strides_or_sizes_is_named() -> None:
    program = compile_case(Plain(), rows(5))
    sparse, nested = torch.rand(7, 4).to_sparse_csr(), torch.nested.nested_tensor([[1.0]])
    for x, layout in ((sparse, "sparse_csr"), (nested, "nested")):
        with pytest.raises(InputError, match=f"argument `x` has layout `{layout}`, the program takes `strided`"):
            program(x)


class Scales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x * 2)


def test_strides_on_which_no_element_depends_may_differ() -> None:
    program = compile_case(Scales(), (torch.rand(4, 5).t(),))
    for x in (torch.rand(1, 4), torch.rand(4, 1).t(), torch.rand(4, 7).t()):
        assert torch.equal(program(x), Scales()(x))
    with pytest.raises(InputError, match=r"strides `\[4, 1\]`, the program takes at this size `\[1, 7\]`"):
        program(torch.rand(7, 4))


def test_one_tensor_in_two_places_stays_one() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ops.fresh(x) + y

    x = rows(5)[0]
    program = compile_case(Twice(), (x, x))
    z = rows(7)[0]
    assert torch.equal(program(z, z), Twice()(z, z))
    with pytest.raises(InputError, match="arguments `x` and `y` were one tensor at the trace and are two now"):
        program(z, z.clone())


def test_inputs_that_share_memory_are_refused_where_one_is_written() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return ops.fresh(y) + x

    program = compile_case(Writes(), (rows(5)[0], rows(5)[0]), dynamic={"x": {0: "tokens"}, "y": {0: "tokens"}})
    x = rows(7)[0]
    with pytest.raises(InputError, match="arguments `x` and `y` share memory, and the model writes to an input"):
        program(x, x.view(7, 4))


class WritesOne(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return ops.fresh(y) + x


BASE = torch.rand(7, 12)


@pytest.mark.parametrize(
    ("x", "y", "shares"),
    [
        (BASE.view(-1)[:28].view(7, 4), BASE.view(-1)[4:32].view(7, 4), True),
        (BASE.view(-1)[:28].view(7, 4), BASE.view(-1)[28:56].view(7, 4), False),
        (BASE.view(-1)[27:55].view(7, 4), BASE.view(-1)[:28].view(7, 4), True),
    ],
    ids=["shifted", "beside", "last element"],
)
def test_views_that_overlap_without_being_equal_are_refused(x: Tensor, y: Tensor, shares: bool) -> None:
    given = {"x": {0: "tokens"}, "y": {0: "tokens"}}
    program = compile_case(WritesOne(), (rows(5)[0], rows(5)[0]), dynamic=given)
    if shares:
        with pytest.raises(InputError, match="arguments `x` and `y` share memory, and the model writes to an input"):
            program(x, y)
        return
    expected = WritesOne()(x.clone(), y.clone())
    assert torch.equal(program(x.clone(), y), expected) and torch.equal(program(x, y), expected)


@pytest.mark.parametrize(
    ("one", "two", "shares"),
    [
        (BASE[:, :4], BASE[:, 4:8], False),
        (BASE[:, :4], BASE[:, 3:7], True),
        (BASE[::2], BASE[1::2], False),
        (BASE[::2], BASE[::3], True),
        (BASE[:0], BASE, False),
        (BASE[:, :4], BASE.view(torch.int16)[:, 7:9], True),
        (BASE[:, :4], BASE.view(torch.int16)[:, 8:10], False),
        (BASE, BASE.clone(), False),
    ],
    ids=["columns", "columns that meet", "rows", "rows that meet", "nothing", "bytes that meet", "bytes", "copy"],
)
def test_tensors_of_one_memory_overlap_where_they_share_an_element(one: Tensor, two: Tensor, shares: bool) -> None:
    assert is_overlapping(one, two) is is_overlapping(two, one) is shares


@pytest.mark.parametrize(
    ("more", "extra", "words"),
    [
        ([1, 2], {"a": 0}, "argument `more` holds `2` items, the program was traced with `1`"),
        ([], {"a": 0}, "argument `more[0]` is missing"),
        ([1], {}, "argument `extra['a']` is missing"),
        ([1], {"a": 0, "b": 0}, "argument `extra['b']` was not given when the program was traced"),
    ],
    ids=["longer list", "shorter list", "missing key", "unknown key"],
)
def test_containers_hold_what_they_held(more: list[int], extra: dict[str, int], words: str) -> None:
    def tensors(size: int, items: list[int], keys: dict[str, int]) -> tuple[object, ...]:
        return rows(size)[0], [rows(size)[0] for _ in items], {key: rows(size)[0] for key in keys}

    linked = {"x": {0: "tokens"}, "more": {0: {0: "tokens"}}, "extra": {"a": {0: "tokens"}}}
    program = compile_case(Nested(), tensors(5, [1], {"a": 0}), dynamic=linked)
    given = tensors(7, [1], {"a": 0})
    assert torch.equal(program(*given), Nested()(*given))
    with pytest.raises(InputError) as raised:
        program(*tensors(7, more, extra))
    assert words in raised.value.message


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_call_under_autocast_is_refused(compiler: str) -> None:
    model = Plain()
    program = compile_case(model, rows(5), options={"compiler": compiler})
    (x,) = rows(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(InputError, match="`torch.autocast` to `bfloat16` is on round the call"):
            program(x)
        with torch.autocast("cpu", enabled=False):
            assert program(x).dtype == torch.float32
    with torch.no_grad():
        assert torch.allclose(program(x), model(x))
