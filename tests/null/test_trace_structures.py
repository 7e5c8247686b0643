"""Nested arguments and results, presence patterns, graphs inside the graph, and what does not trace at all."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

import piecework as pw
from case_operators import assert_same, assert_serves, compile_case, rows
from piecework.errors import InputError, OptionError, TraceError

ops = torch.ops.cases


@dataclasses.dataclass
class Batch:
    hidden: Tensor
    extra: dict[str, Any]
    note: str = "n"


@dataclasses.dataclass
class Result:
    main: Tensor
    parts: dict[str, Any]
    rest: list[Any]


class Nested(nn.Module):
    def forward(self, batch: Batch, pair: tuple[Tensor, list[Tensor]], bias: Tensor | None = None) -> Tensor:
        y = ops.fresh(batch.hidden) + batch.extra["k"][0] * pair[0] - pair[1][1]
        return y if bias is None else y + bias


def nested(size: int) -> tuple[Batch, tuple[Tensor, list[Tensor]], None]:
    x = [rows(size)[0] for _ in range(5)]
    return Batch(x[0], {"k": [x[1], None], "flag": True}), (x[2], [x[3], x[4]]), None


NESTED = {"batch": {"hidden": {0: "tokens"}, "extra": {"k": {-2: "tokens"}}}, "pair": {0: "tokens"}}


def test_nested_arguments() -> None:
    program = assert_serves(Nested(), nested, dynamic=NESTED)
    batch, pair, _ = nested(7)
    with pytest.raises(InputError, match=re.escape("argument `batch.extra['z']` was not given when the program was")):
        program(Batch(batch.hidden, {**batch.extra, "z": 1}), pair)
    with pytest.raises(InputError, match="argument `batch.note` is `'m'`, the program was traced with `'n'`"):
        program(Batch(batch.hidden, batch.extra, "m"), pair)
    with pytest.raises(
        InputError, match=re.escape("argument `pair[1]` holds `3` items, the program was traced with `2`")
    ):
        program(batch, (pair[0], [*pair[1], pair[0]]))
    with pytest.raises(InputError, match=re.escape("argument `batch.extra['k'][0]` is missing")):
        program(Batch(batch.hidden, {"k": [None, None], "flag": True}), pair)
    with pytest.raises(InputError, match="argument `bias` was not given"):
        program(batch, pair, bias=torch.rand(4))


def test_a_rule_that_reaches_nothing_is_an_error() -> None:
    with pytest.raises(OptionError, match="`dynamic` names dimension `5` of `x`, which has `2`"):
        compile_case(Modelled(), rows(5), dynamic={"x": {5: "tokens"}})
    with pytest.raises(OptionError, match="`dynamic` reaches for `'deep'` in `x`, which has no members"):
        compile_case(Modelled(), rows(5), dynamic={"x": {"deep": {0: "tokens"}}})
    with pytest.raises(OptionError, match="`dynamic` names `y`, which forward"):
        compile_case(Modelled(), rows(5), dynamic={"y": {0: "tokens"}})


def test_an_argument_that_no_program_can_be_given_is_named() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, what: object) -> Tensor:
            return x * 2

    with pytest.raises(OptionError, match="argument `what` is a `object`, which a program cannot be given"):
        compile_case(Takes(), (rows(5)[0], object()))


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = ops.fresh(x * self.weight)
        return (
            Result(y, {"x": x, "view": x[:, :2], "again": y, 3: "str"}, [None, 7, 2.5, True, x.shape[0]]),
            (self.weight, [2 * x.shape[0]], y.view(-1)),
            BaseModelOutput(last_hidden_state=y + 1),
        )


class Modelled(nn.Module):
    def forward(self, x: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=ops.fresh(x), hidden_states=(x * 2, x + 1))


class Sized(nn.Module):
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = ops.fresh(x)
        return y, x[0].shape, OrderedDict([("a.b", y + 1), ("c", [y])]), {"plain": x.shape[0]}


@pytest.mark.parametrize("model", [Structured, Modelled, Sized])
def test_results_keep_their_structure(model: type[nn.Module]) -> None:
    assert_serves(model(), rows)


def test_a_result_s_structure_is_there_without_the_model() -> None:
    store, model = pw.MemoryStore(), Structured()
    program = pw.load(store, key=compile_case(model, rows(5), store=store).key, weights=model.state_dict())
    x = rows(9)[0]
    with torch.no_grad():
        expected = model(x)
    got = program(x)
    assert_same(got, expected)
    assert got[0].main is got[0].parts["again"] and got[0].parts["x"] is x


def test_a_number_that_follows_from_a_size_is_not_frozen() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            return x * 2, x.shape[0] / 2

    with pytest.raises(TraceError, match="a Python number that depends on a size: `6.5`, then `"):
        compile_case(Half(), rows(5))


class Optional(nn.Module):
    def forward(
        self,
        x: Tensor | None = None,
        ids: Tensor | None = None,
        cache: dict[str, Tensor] | None = None,
        mode: str = "a",
    ) -> Tensor:
        y = torch.nn.functional.one_hot(ids, 4).float() if x is None else x
        y = ops.fresh(y)
        if cache is not None:
            y = y + cache["key"]
        return y * (2 if mode == "a" else 3)


def examples(size: int) -> list[dict[str, Any]]:
    x, ids = rows(size)[0], torch.arange(size) % 4
    return [{"x": x}, {"ids": ids}, {"x": x, "cache": {"key": x + 1}}, {"x": x, "mode": "b"}, {"x": x.double()}]


ROWS = {"x": {0: "tokens"}, "ids": {0: "tokens"}, "cache": {0: "tokens"}}


def test_patterns_are_variants_of_one_program() -> None:
    store, model = pw.MemoryStore(), Optional()
    program = compile_case(model, examples(5), dynamic=ROWS, store=store)
    warm = pw.load(store, key=program.key, weights={})
    for size in (1, 2, 65):
        for given in examples(size):
            assert_same(program(**given), model(**given))
            assert_same(warm(**given), model(**given))
    x = rows(3)[0]
    assert_same(program(x, mode="a"), model(x))
    assert_same(program(x, None, {"key": x}), model(x, None, {"key": x}))
    assert program.check() == ()


def test_a_pattern_that_was_not_traced_raises_by_name() -> None:
    program = compile_case(Optional(), examples(5), dynamic=ROWS)
    x, ids = rows(3)[0], torch.arange(3)
    with pytest.raises(
        InputError, match="arguments `ids, cache` were not given together when the program was"
    ) as raised:
        program(ids=ids, cache={"key": x})
    assert raised.value.hint.startswith("traced are `x`; `ids`; `x, cache`; `x, mode`; `x`")
    with pytest.raises(InputError, match="none of the `2` traced variants takes these arguments: .*float16"):
        program(x.half())
    with pytest.raises(InputError, match="argument `mode` is `'c'`, the program was traced with `'b'`"):
        program(x, mode="c")
    with pytest.raises(pw.errors.ShapeOutOfRange):
        program(ids=ids[:0])


def test_no_example_at_all_is_an_error() -> None:
    with pytest.raises(OptionError, match="`example_inputs` is an empty list"):
        compile_case(Optional(), [])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def block(self, x: Tensor, by: int) -> Tensor:
        return torch.relu(ops.fresh(self.inner(x))) * by + x.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, 2, use_reentrant=False)
        return checkpoint(self.block, y, 3, use_reentrant=False)


def test_a_checkpointed_block_is_put_in_line() -> None:
    assert_serves(Checkpointed(), rows)


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("tokens", x.shape)
        return x * 2


class BranchesOnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class CallsBuiltin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(open(__file__).read())


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("never mind")


@pytest.mark.parametrize(
    ("model", "words", "hint"),
    [
        (Prints, "`print", "take the print out of forward"),
        (BranchesOnValues, "Data-dependent branching", "use torch.where, or make the branch an opaque operator"),
        (CallsBuiltin, "`open", "use a tensor operation instead, or put the call into an opaque operator"),
        (Conditional, "the graph holds `torch.cond`", "choose with torch.where, or make it an opaque operator"),
        (Raises, "never mind", "call the model uncompiled"),
    ],
)
def test_what_does_not_trace_is_an_error_with_line_and_hint(model: type[nn.Module], words: str, hint: str) -> None:
    with pytest.raises(TraceError) as raised:
        compile_case(model(), rows(5))
    assert words in raised.value.message
    assert hint in raised.value.hint
    line = model.forward.__code__.co_firstlineno
    assert (raised.value.facts["file"], raised.value.facts["line"]) in [(__file__, line + 1), (__file__, line + 2)]
    assert f"{__file__}:{raised.value.facts['line']}" in raised.value.message


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_without_operations() -> None:
    program, x = compile_case(Nothing(), rows(5)), rows(7)[0]
    assert program(x) is x
