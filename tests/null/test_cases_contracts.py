"""Operators that do not keep their contract: each is refused, naming the operator and the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import assert_serves, calls, compile_case, rows
from piecework.errors import ContractError, SplitError

SPACE = "contracts"


def bump(x: Tensor) -> Tensor:
    x.add_(100)
    return x + 1


def bump_large(x: Tensor) -> Tensor:
    if len(x) % 8 == 0:
        x.add_(100)
    return x + 1


def identity(x: Tensor) -> Tensor:
    return x


def identity_when_even(x: Tensor) -> Tensor:
    return x.view(-1, 4) if len(x) % 2 == 0 else x.clone()


def strided(x: Tensor) -> Tensor:
    return (x * 3).t().contiguous().t()


def double(x: Tensor) -> Tensor:
    return x.double() * 3


def triple(x: Tensor) -> Tensor:
    return x * 3


def same(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def padded(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], (x.shape[1] + 7) // 8 * 8)


def padded_rows(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0] + 7) // 8 * 8, x.shape[1])


BROKEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "bump": (bump, same, "writes its argument `x`, which its schema does not say"),
    "bump_large": (bump_large, same, "writes its argument `x`, which its schema does not say"),
    "identity": (identity, same, "gives back its argument `x`, or a view of it, as its result"),
    "identity_when_even": (identity_when_even, same, "gives back its argument `x`, or a view of it, as its result"),
    "strided": (strided, same, "gives a result of strides `[1, 13]`, where its fake says `[4, 1]`"),
    "double": (double, same, "gives a result of dtype `float64`, where its fake says `float32`"),
    "padded": (triple, padded, "gives a result of shape `[13, 4]`, where its fake says `[13, 8]`"),
    "padded_rows": (triple, padded_rows, "gives a result of shape `[13, 4]`, where its fake says `[16, 4]`"),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library(SPACE, "FRAGMENT")
    for name, (body, fake, _) in BROKEN.items():
        made.define(f"{name}(Tensor x) -> Tensor")
        made.impl(name, body, "CPU")
        torch.library.register_fake(f"{SPACE}::{name}", fake, lib=made)
    made.define("without(Tensor x) -> Tensor")
    made.impl("without", triple, "CPU")
    made.define("defaulted(Tensor x, int by=3) -> Tensor")
    made.impl("defaulted", lambda x, by=3: x * by, "CPU")
    torch.library.register_fake(f"{SPACE}::defaulted", lambda x, by: torch.empty_like(x), lib=made)
    yield made


class Calls(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.operator = getattr(getattr(torch.ops, SPACE), name)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        a = self.operator(y)
        return y + 1, a * 2


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "inside"])
def test_a_broken_operator_is_named_with_the_argument(name: str, is_cut: bool) -> None:
    options = {"split_ops": (f"{SPACE}::{name}",) if is_cut else ()}
    with pytest.raises(ContractError) as raised:
        compile_case(Calls(name), rows(5), options=options)
    assert raised.value.message == f"operator `{SPACE}::{name}` {BROKEN[name][2]}"
    assert raised.value.facts["operator"] == f"{SPACE}::{name}"
    assert raised.value.facts["argument"] in ("x", "result")


def test_a_weight_that_an_operator_wrote_is_put_back() -> None:
    class Bumps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ops.contracts.bump(self.weight)

    model = Bumps()
    with pytest.raises(ContractError, match="writes its argument `x`"):
        compile_case(model, rows(5), options={"split_ops": (f"{SPACE}::bump",)})
    assert torch.equal(model.weight.data, torch.ones(4, 4))


def test_an_operator_without_a_fake_is_named() -> None:
    with pytest.raises(pw.errors.PieceworkError, match=rf"{SPACE}[:.]+without"):
        compile_case(Calls("without"), rows(5), options={"split_ops": (f"{SPACE}::without",)})


def test_a_default_that_the_fake_lacks_is_named() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.contracts.defaulted(x * 2, 5) + 1

    with pytest.raises(SplitError, match=f"operator `{SPACE}::defaulted` has a default for `by` that its fake lacks"):
        compile_case(Gives(), rows(5), options={"split_ops": (f"{SPACE}::defaulted",)})


class Discards(nn.Module):
    """Calls an operator for what it does beside its result, which nothing declares."""

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.cases.put(x * 2)
        return torch.ops.cases.fresh(x) + 1


class DiscardsInAChain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        dead = torch.relu(torch.ops.cases.put(x * 2)) + 1
        dead.view(-1)
        return torch.ops.cases.fresh(x) + 1


class WritesAndDiscards(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.cases.into(torch.ops.cases.put(x), out)
        return torch.ops.cases.fresh(x) + 1


@pytest.mark.parametrize("model", [Discards, DiscardsInAChain], ids=lambda model: model.__name__)
def test_an_effect_that_a_compiler_would_remove_is_named(model: type[nn.Module]) -> None:
    for options in ({"split_ops": ("cases::fresh",)}, {"split_ops": (), "split_ops_only": ()}):
        with pytest.raises(ContractError, match="operator `cases::put` is called for nothing") as raised:
            compile_case(model(), rows(5), options=options)
        assert "never removed" in raised.value.hint and raised.value.facts["operator"] == "cases::put"


@pytest.mark.parametrize("model", [Discards, DiscardsInAChain], ids=lambda model: model.__name__)
def test_an_effect_that_is_cut_at_happens_each_time(model: type[nn.Module]) -> None:
    program = assert_serves(model(), rows)
    calls.clear()
    program(*rows(7))
    assert calls == ["put 7"]


def test_what_a_declared_write_takes_in_is_not_in_vain() -> None:
    assert_serves(WritesAndDiscards(), rows, options={"split_ops": ("cases::fresh",)})


def test_operators_that_keep_their_contract_are_served() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            o = torch.empty_like(x)
            a, b = torch.ops.cases.two(torch.ops.cases.fresh(x / 0.0))
            torch.ops.cases.into(a, o)
            return o + b

    assert_serves(Keeps(), rows)
