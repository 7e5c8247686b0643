"""What forward writes outside its results: refused with the line and left as it was, or no loss at all."""

from __future__ import annotations

import collections
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from case_operators import assert_same, compile_case, rows
from piecework.errors import TraceError

HERE = re.escape(__name__)
NUMBER = 2.0
NUMBERS = [1.0, 2.0]
NESTED: dict[str, Any] = {"a": {"s": 2.0}}
MEMBERS = {1, 2}
QUEUE = collections.deque([1])
TENSOR = torch.zeros(4)


class Settings:
    scale = 1
    known: list[int] = []

    def __init__(self) -> None:
        self.value = 1

    @classmethod
    def grow(cls) -> None:
        cls.scale += 1


@dataclass
class Point:
    x: float = 1.0


SETTINGS, POINT = Settings(), Point()


def closure() -> Callable[[Tensor], Tensor]:
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x

    return count


COUNTING = closure()


def with_default(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006  # the point is that it is shared
    seen.append(1)
    return x


@lru_cache
def remembered(number: int) -> int:
    NUMBERS.append(number)
    return number


class Model(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.flag: int | None = None
        self.settings = Settings()
        self.numbers = itertools.count()
        self.random = random.Random(0)
        self.register_buffer("seen", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.eval()


def global_number(self: Model, x: Tensor) -> Tensor:
    global NUMBER  # noqa: PLW0603  # what is tried
    NUMBER = NUMBER + 1
    return x * 2


def global_list(self: Model, x: Tensor) -> Tensor:
    NUMBERS.append(2.0)
    return x * 2


def global_nested(self: Model, x: Tensor) -> Tensor:
    NESTED["a"]["s"] = 7.0
    return x * 2


def global_set(self: Model, x: Tensor) -> Tensor:
    MEMBERS.add(9)
    return x * 2


def global_deque(self: Model, x: Tensor) -> Tensor:
    QUEUE.append(3)
    return x * 2


def global_object(self: Model, x: Tensor) -> Tensor:
    SETTINGS.value = 5
    return x * 2


def global_dataclass(self: Model, x: Tensor) -> Tensor:
    POINT.x = 5.0
    return x * 2


def global_tensor(self: Model, x: Tensor) -> Tensor:
    TENSOR[:2].add_(1)
    return x * 2


def class_attribute(self: Model, x: Tensor) -> Tensor:
    type(self).scale = 9.0
    return x * 2


def class_method(self: Model, x: Tensor) -> Tensor:
    Settings.grow()
    return x * 2


def class_list(self: Model, x: Tensor) -> Tensor:
    Settings.known.append(1)
    return x * 2


def closed_over(self: Model, x: Tensor) -> Tensor:
    return COUNTING(x) * 2


def default_value(self: Model, x: Tensor) -> Tensor:
    return with_default(x) * 2


def cache(self: Model, x: Tensor) -> Tensor:
    return x * remembered(3)


def training_of_a_module(self: Model, x: Tensor) -> Tensor:
    self.act.training = True
    return x * 2


def training_of_all(self: Model, x: Tensor) -> Tensor:
    self.train()
    return self.drop(x)


def new_attribute_of_a_module(self: Model, x: Tensor) -> Tensor:
    self.act.fresh = 5
    return x * 2


def attribute_of_an_object(self: Model, x: Tensor) -> Tensor:
    self.settings.value += 1
    return x * 2


def another_buffer(self: Model, x: Tensor) -> Tensor:
    self.seen = self.seen + x.sum(0)
    return x * 2


def iterator(self: Model, x: Tensor) -> Tensor:
    return x * next(self.numbers)


def generator(self: Model, x: Tensor) -> Tensor:
    return x * self.random.random()


def python_random(self: Model, x: Tensor) -> Tensor:
    return x * random.randint(1, 5)


def attribute_of_an_input(self: Model, x: Tensor) -> Tensor:
    x.tag = 5  # type: ignore[attr-defined]
    return x * 2


LOST = [
    (global_number, rf"the global `{HERE}.NUMBER`"),
    (global_list, rf"inside `{HERE}.NUMBERS`, a `list`"),
    (global_nested, rf"inside `{HERE}.NESTED\['a'\]`, a `dict`"),
    (global_set, rf"inside `{HERE}.MEMBERS`, a `set`"),
    (global_deque, rf"inside `{HERE}.QUEUE`, a `deque`"),
    (global_object, rf"the attribute `{HERE}.SETTINGS.value`"),
    (global_dataclass, rf"the attribute `{HERE}.POINT.x`"),
    (global_tensor, rf"to the tensor `{HERE}.TENSOR`"),
    (class_attribute, r"the class attribute `Made.scale`"),
    (class_method, r"the class attribute `Settings.scale`"),
    (class_list, rf"inside `{HERE}.Settings.known`, a `list`"),
    (closed_over, rf"the variable `{HERE}.COUNTING.__closure__\[0\]` of a closure"),
    (default_value, rf"inside `{HERE}.with_default.__defaults__\[0\]`, a `list`"),
    (cache, rf"inside `{HERE}.NUMBERS`, a `list`"),
    (training_of_a_module, r"the attribute `act.training`"),
    (training_of_all, r"the attribute `training`"),
    (new_attribute_of_a_module, r"the attribute `act.fresh`"),
    (attribute_of_an_object, r"the attribute `settings.value`"),
    (another_buffer, r"the attribute `seen`"),
    (iterator, r"inside the attribute `numbers`, a `count`"),
    (generator, r"inside the attribute `random`, a `Random`"),
    (python_random, r"the state of `random`"),
    (attribute_of_an_input, r"the attribute `x.tag`"),
]


def make(forward: Callable[..., Any]) -> Model:
    return type("Made", (Model,), {"forward": forward})()  # type: ignore[no-any-return]


def state(model: Model) -> str:
    """Write all that the functions above write to, the generator of `random` apart."""
    return repr((
        NUMBER, NUMBERS, NESTED, MEMBERS, QUEUE, TENSOR, Settings.scale, Settings.known, SETTINGS.value, POINT,
        type(model).scale, COUNTING.__closure__[0].cell_contents, with_default.__defaults__, model.training,  # type: ignore[index, attr-defined]
        model.act.training, sorted(vars(model.act)), type(model.act), model.settings.value, model.seen, model.numbers,
        model.random.getstate(), model.flag,
    ))  # fmt: skip


@pytest.mark.parametrize(("forward", "what"), LOST, ids=lambda value: getattr(value, "__name__", ""))
def test_a_write_that_a_program_would_lose_is_refused_with_its_line(forward: Callable[..., Any], what: str) -> None:
    model, (x,) = make(forward), rows(5)
    before = state(model)
    # Some lines write inside a function that the forward calls; they stand in this file or in torch's own.
    with pytest.raises(TraceError, match=rf"^forward writes {what} at {re.escape(__file__)}:\d+") as raised:
        compile_case(model, (x,))
    assert raised.value.facts["line"] > 0 and "opaque operator" in raised.value.hint
    assert state(model) == before and not hasattr(x, "tag")


def flag_put_back(self: Model, x: Tensor) -> Tensor:
    old, self.flag = self.flag, 3
    y = x * 2 if self.flag == 3 else x
    self.flag = old
    return y


def item_put_back(self: Model, x: Tensor) -> Tensor:
    NUMBERS.append(1.0)
    y = x * len(NUMBERS)
    NUMBERS.pop()
    return y


def same_value(self: Model, x: Tensor) -> Tensor:
    self.flag = None
    self.act.eval()
    return self.act(x - 1)


def own_objects(self: Model, x: Tensor) -> Tensor:
    settings, numbers = Settings(), [1.0]
    settings.value = 4
    numbers.append(settings.value)
    return x * numbers[-1]


def buffer_in_place(self: Model, x: Tensor) -> Tensor:
    self.seen += x.sum(0)
    self.seen *= 2
    self.plain -= 1
    return x + self.seen + self.plain


@pytest.mark.parametrize(
    "forward",
    [flag_put_back, item_put_back, same_value, own_objects, buffer_in_place],
    ids=lambda forward: forward.__name__,
)
def test_a_write_that_leaves_nothing_changed_is_served(forward: Callable[..., Any]) -> None:
    model, twin = make(forward), make(forward)
    program = compile_case(model, rows(5))
    for size in (1, 7, 64):
        (x,) = rows(size)
        assert_same(program(x), twin(x))
    assert torch.equal(model.seen, twin.seen) and torch.equal(model.plain, twin.plain)
