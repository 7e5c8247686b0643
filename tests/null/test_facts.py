"""Python values that a trace read: told by `check` when they are others, and a miss for the next start."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import assert_same, compile_case, rows
from piecework.events import Recorder, RecordHit, RecordMiss


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Settings:
    def __init__(self) -> None:
        self.mode = Mode.FAST
        self.table = torch.ones(4)


MODE = Mode.FAST
ACTIVATION = torch.relu
TABLE = torch.ones(4)


class Parent(nn.Module):
    scale = 2.0

    def double(self, x: Tensor) -> Tensor:
        return x * 2

    @property
    def offset(self) -> float:
        return 3.0


class Model(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.mode = Mode.FAST
        self.settings = Settings()
        self.inner = nn.Linear(4, 4)
        self.names = {"a": 1.0}
        self.alpha = numpy.float32(2.0)
        self.eval()


def setting(path: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *holders, name = path.split(".")
        for holder in holders:
            model = getattr(model, holder)
        setattr(model, name, value)

    return change


def in_module(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: globals().__setitem__(name, value)


def on_class(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(type(model), name, value)


HERE = __name__
Forward = Callable[[Any, Tensor], Tensor]
CHANGES: dict[str, tuple[Forward, Callable[[Any], None], str]] = {
    "enumeration": (
        lambda self, x: x * 2 if self.mode is Mode.FAST else x,
        setting("mode", Mode.EXACT),
        f"`model.mode` was `{HERE}:Mode.FAST` and is `{HERE}:Mode.EXACT`",
    ),
    "enumeration of an object": (
        lambda self, x: x * 2 if self.settings.mode == Mode.FAST else x,
        setting("settings.mode", Mode.EXACT),
        f"`model.settings.mode` was `{HERE}:Mode.FAST`",
    ),
    "enumeration of a module": (
        lambda self, x: x * 2 if MODE is Mode.FAST else x,
        in_module("MODE", Mode.EXACT),
        f"`{HERE}.MODE` was `{HERE}:Mode.FAST`",
    ),
    "function of torch": (
        lambda self, x: ACTIVATION(x - 1),
        in_module("ACTIVATION", torch.sigmoid),
        f"`{HERE}.ACTIVATION` was `torch:_VariableFunctionsClass.relu`",
    ),
    "key": (
        lambda self, x: x * 2 if "b" in self.names else x,
        lambda model: model.names.__setitem__("b", 1.0),
        "`'b' in model.names` was `bool:False` and is `bool:True`",
    ),
    "class attribute over a parent's": (
        lambda self, x: x * self.scale,
        on_class("scale", 5.0),
        "`model.scale` was `float:2.0` and is `float:5.0`",
    ),
    "method over a parent's": (
        lambda self, x: self.double(x),
        on_class("double", lambda self, x: x * 7),
        f"`the class of {HERE}.Made.double` was `str:'{HERE}:Parent'` and is `str:'{HERE}:Made'`",
    ),
    "property over a parent's": (
        lambda self, x: x + self.offset,
        on_class("offset", property(lambda self: 9.0)),
        "`model.offset.fget` was",
    ),
    "tensor of a module, in place": (
        lambda self, x: x + TABLE,
        lambda model: TABLE.add_(1),
        f"`{HERE}.TABLE` was `torch.float32 (4,)",
    ),
    "tensor of an object": (
        lambda self, x: x + self.settings.table,
        lambda model: setattr(model.settings, "table", torch.zeros(4)),
        "`model.settings.table` was `torch.float32 (4,)",
    ),
    "number of NumPy": (
        lambda self, x: x * self.alpha,
        setting("alpha", numpy.float32(5.0)),
        "`model.alpha` was `torch.float32 ()",
    ),
    "dtype of a weight that is not read": (
        lambda self, x: x.to(self.inner.weight.dtype) * 2,
        lambda model: model.inner.double(),
        "`model.inner.weight` was `torch.float32 (4, 4) requires_grad=True` and is `torch.float64",
    ),
    "hook of all modules": (
        lambda self, x: self.inner(x),
        lambda model: HOOKS.append(nn.modules.module.register_module_forward_hook(lambda *given: given[2] * 2)),
        "`torch.nn.modules.module._global_forward_hooks` was `[]`",
    ),
}
HOOKS: list[Any] = []


@pytest.fixture(autouse=True)
def as_before() -> Any:
    kept = {name: globals()[name] for name in ("MODE", "ACTIVATION")}
    yield
    globals().update(kept)
    TABLE.fill_(1)
    while HOOKS:
        HOOKS.pop().remove()


@pytest.mark.parametrize(("forward", "change", "told"), CHANGES.values(), ids=CHANGES)
def test_a_value_that_changes_is_told_and_is_a_miss(
    forward: Forward, change: Callable[[Any], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Made", (Model,), {"forward": forward})
    monkeypatch.setitem(globals(), "Made", kind)
    model, store = kind(), pw.MemoryStore()
    program = compile_case(model, rows(5), store=store)
    assert program.check() == ()
    found = Recorder()
    compile_case(model, rows(5), store=store, observer=found)
    assert found.of(RecordHit) and not found.of(RecordMiss)
    change(model)
    assert any(finding.startswith(told) for finding in program.check()), program.check()
    missed = Recorder()
    again = compile_case(model, rows(5), store=store, observer=missed)
    (x,) = rows(7)
    with torch.no_grad():
        assert_same(again(x), model(x))
    assert missed.of(RecordMiss) and not missed.of(RecordHit)
