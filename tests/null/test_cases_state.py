"""State beside the arguments: attributes, weights and constants that change; and what a call may vary."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import assert_serves, compile_case, rows
from piecework.errors import BindError, InputError, TraceError
from piecework.events import Recorder, RecordHit, RecordMiss, SplitDone

ops = torch.ops.cases
SCALES = {"x": 2.0}
TABLE = torch.arange(8192.0 * 4).view(-1, 4)


class Numbered(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + 10 if self.number == 0 else x * 1.5 + 1


class LayersByNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(number) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ops.fresh(layer(x))
        return x


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.doubled = False
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.plain = torch.rand(4)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x * self.weight) * self.scale * SCALES["x"] + self.shift + self.plain
        return self.drop(y * 2 if self.doubled else y)


def both(program: pw.Program, model: nn.Module) -> tuple[Tensor, Tensor]:
    x = rows(7)[0]
    with torch.no_grad():
        return program(x), model(x)


def missed(model: nn.Module, store: pw.MemoryStore) -> bool:
    recorder = Recorder()
    program = compile_case(model, rows(5), store=store, observer=recorder)
    assert torch.equal(*both(program, model))
    assert len(recorder.of(RecordHit)) + len(recorder.of(RecordMiss)) == 1
    return bool(recorder.of(RecordMiss))


def test_a_number_read_from_self_belongs_to_its_layer() -> None:
    recorder = Recorder()
    assert_serves(LayersByNumber(), rows, observer=recorder)
    assert recorder.of(SplitDone)[0].distinct == 2


@pytest.mark.parametrize(
    ("attribute", "value", "shown"),
    [
        ("scale", 3.0, "`model.scale` was `float:2.0` and is `float:3.0`"),
        ("doubled", True, "`model.doubled` was `bool:False`"),
    ],
)
def test_a_changed_attribute_is_told_and_is_a_miss(attribute: str, value: object, shown: str) -> None:
    model, store = Stateful(), pw.MemoryStore()
    program = compile_case(model, rows(5), store=store)
    assert program.check() == ()
    setattr(model, attribute, value)
    (finding,) = program.check()
    assert finding.startswith(shown)
    assert re.search(r"test_cases_state.py:\d+\)$", finding)
    assert missed(model, store)


def test_a_changed_registry_is_told_and_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = Stateful(), pw.MemoryStore()
    program = compile_case(model, rows(5), store=store)
    monkeypatch.setitem(SCALES, "x", 5.0)
    assert any("SCALES" in finding and "5.0" in finding for finding in program.check())
    assert missed(model, store)


def test_training_switched_on_is_told_and_is_a_miss() -> None:
    model, store = Stateful(), pw.MemoryStore()
    program = compile_case(model, rows(5), store=store)
    model.train()
    assert any("training" in finding for finding in program.check())
    recorder = Recorder()
    compile_case(model, rows(5), store=store, observer=recorder)
    assert recorder.of(RecordMiss)


def test_a_weight_written_in_place_is_read() -> None:
    model = Stateful()
    program = compile_case(model, rows(5))
    with torch.no_grad():
        model.weight.copy_(torch.rand(4))
        model.shift.copy_(torch.rand(4))
        model.plain.copy_(torch.rand(4))
    assert program.check() == ()
    assert torch.equal(*both(program, model))


def rebind_parameter(model: Stateful) -> None:
    model.weight = nn.Parameter(torch.rand(4))


def rebind_plain(model: Stateful) -> None:
    model.plain = torch.rand(4)


def rebind_buffer(model: Stateful) -> None:
    model.shift = torch.rand(4)


def rebind_data(model: Stateful) -> None:
    model.weight.data = torch.rand(4)


@pytest.mark.parametrize(
    ("rebind", "name"),
    [(rebind_parameter, "weight"), (rebind_plain, "plain"), (rebind_buffer, "shift"), (rebind_data, "weight")],
)
def test_a_weight_that_is_another_tensor_is_named_and_refresh_reads_it(rebind, name: str) -> None:  # type: ignore[no-untyped-def]
    model = Stateful()
    program = compile_case(model, rows(5))
    rebind(model)
    (finding,) = program.check()
    assert finding == f"weight `{name}` of the model is another tensor than the program reads: call `refresh()`"
    program.refresh()
    assert program.check() == ()
    assert torch.equal(*both(program, model))


def test_refresh_takes_weights_by_name_and_refuses_what_does_not_fit() -> None:
    model = Stateful()
    program = compile_case(model, rows(5))
    program.refresh({"weight": torch.ones(4)})
    model.weight = nn.Parameter(torch.ones(4))
    assert torch.equal(*both(program, model))
    with pytest.raises(BindError, match="weight `weight` is `float32\\[5\\] cpu`, the program was compiled for"):
        program.refresh({"weight": torch.ones(5)})
    assert torch.equal(*both(program, model))


def test_a_plain_tensor_of_another_shape_is_a_miss() -> None:
    model, store = Stateful(), pw.MemoryStore()
    compile_case(model, rows(5), store=store)
    model.plain = torch.rand(1)
    assert missed(model, store)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Keeps(nn.Module):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x + 1


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x * 2


@pytest.mark.parametrize(
    ("model", "name", "what"),
    [
        (Counts, "calls", "the attribute `calls`"),
        (Keeps, "last", "the attribute `last`"),
        (Appends, "seen", "inside the attribute `seen`, a `list`"),
    ],
)
def test_an_attribute_that_forward_writes_is_refused_and_put_back(model: type[nn.Module], name: str, what: str) -> None:
    instance = model()
    before = repr(getattr(instance, name))
    with pytest.raises(TraceError, match=rf"forward writes {what} at {re.escape(__file__)}:\d+"):
        compile_case(instance, rows(5))
    assert repr(getattr(instance, name)) == before


class Constants(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x * torch.tensor([1.0, 2.0, 3.0, 4.0])) + TABLE[: x.shape[0]]


def test_constants_are_stored_and_rebound() -> None:
    store = pw.MemoryStore()
    program = assert_serves(Constants(), rows, store=store)
    warm = pw.load(store, key=program.key, weights={})
    for size in (1, 65):
        x = rows(size)[0]
        assert torch.equal(warm(x), Constants()(x))


class Modal(nn.Module):
    def forward(self, x: Tensor, mode: str = "extend", alpha: float = 1.0) -> Tensor:
        y = ops.fresh(x)
        return y * 2 + alpha if mode == "extend" else y - alpha


def test_an_argument_of_another_value_raises_by_name_and_compiles_nothing() -> None:
    program = compile_case(Modal(), {"x": rows(5)[0], "mode": "extend"})
    x = rows(7)[0]
    assert torch.equal(program(x), Modal()(x))
    assert torch.equal(program(x, "extend"), Modal()(x))
    with pytest.raises(InputError, match="argument `mode` is `'mixed'`, the program was traced with `'extend'`"):
        program(x, mode="mixed")
    with pytest.raises(InputError, match="argument `alpha` was not given when the program was traced"):
        program(x, alpha=2.0)


def test_a_constant_of_another_type_is_another_value() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float) -> Tensor:
            return x * by

    program = compile_case(Scaled(), (torch.arange(20).view(5, 4), 2))
    assert program(torch.ones(3, 4, dtype=torch.int64), 2).dtype == torch.int64
    with pytest.raises(InputError, match="argument `by` is `2.0`, the program was traced with `2`"):
        program(torch.ones(3, 4, dtype=torch.int64), 2.0)
