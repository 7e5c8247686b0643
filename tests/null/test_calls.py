"""What a caller gets wrong is told in the words of the call: names, counts, sizes, gradients; and returned weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.errors import BindError, GuardError, InputError, TraceError

EAGER = pw.CompileOptions(compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, other: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        return self.linear(rows) + other  # type: ignore[no-any-return]


DYNAMIC = {"rows": {0: "tokens"}, "other": {0: "tokens"}}


@pytest.fixture(scope="module")
def calls() -> dict[str, Callable[..., Any]]:
    """One model as a program, as captured, and as it is in mode `none`."""
    model, example = Shift().requires_grad_(False).eval(), (torch.rand(5, 4), torch.rand(5, 4))
    program = pw.compile(model, example, dynamic=DYNAMIC, options=EAGER, store=pw.MemoryStore())
    sizes = pw.CaptureOptions(prefill="full", prefill_sizes=(8,))
    plain = pw.CompileOptions(mode="none")
    return {
        "program": program,
        "captured": pw.capture(program, options=sizes, device="dry"),
        "mode none": pw.compile(model, example, dynamic=DYNAMIC, options=plain, store=pw.MemoryStore()),
    }


@pytest.mark.parametrize("form", ["program", "captured", "mode none"])
def test_arguments_that_python_does_not_take(calls: dict[str, Callable[..., Any]], form: str) -> None:
    rows = torch.rand(5, 4)
    for args, given, said, hint in (
        ((rows,), {}, "argument `other` is missing", "it takes `rows`, `other`"),
        ((rows,), {"othr": rows}, "the program takes no argument `othr`", "did you mean `other`? it takes `rows`"),
        ((rows, rows, None, 4), {}, "the call gives 4 arguments by place, and the program takes 3 so", "it takes"),
        ((rows, rows), {"rows": rows}, "argument `rows` is given twice, by place and by name", "give it once"),
    ):
        with pytest.raises(InputError) as told:
            calls[form](*args, **given)
        assert told.value.message == said and hint in told.value.hint


def test_a_type_error_from_inside_stays_what_it_is() -> None:
    library = torch.library.Library("calls", "DEF")
    library.define("fails(Tensor rows) -> Tensor")

    @pw.split_op("calls::fails")
    def fails(rows: torch.Tensor) -> torch.Tensor:
        raise TypeError("of the body")

    library.impl("fails", fails, "CPU")
    torch.library.register_fake("calls::fails", lambda rows: torch.empty_like(rows), lib=library)

    class Failing(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.ops.calls.fails(rows + 1)  # type: ignore[no-any-return]

    rows = torch.rand(5, 4)
    program = pw.compile(
        Failing(), (rows,), dynamic={"rows": {0: "tokens"}}, options=EAGER, store=pw.MemoryStore()
    )
    with pytest.raises(TypeError, match="of the body"):
        program(rows)


def test_linked_sizes_are_told_by_both_places(calls: dict[str, Callable[..., Any]]) -> None:
    told = re.escape("dimension `tokens` is `5` at `rows.shape[0]` and `6` at `other.shape[0]`")
    with pytest.raises(InputError, match=told):
        calls["program"](torch.rand(5, 4), torch.rand(6, 4))


def test_an_argument_that_wants_a_gradient_is_refused_and_results_want_none() -> None:
    wanting, rows = torch.rand(5, 4, requires_grad=True), torch.rand(5, 4)
    model = Shift().eval()  # its weights want gradients
    program = pw.compile(model, (rows, rows.clone()), dynamic=DYNAMIC, options=EAGER, store=pw.MemoryStore())
    assert model(rows, rows).requires_grad and not program(rows, rows.clone()).requires_grad
    with pytest.raises(InputError, match="argument `other` requires a gradient") as told:
        program(rows, wanting)
    assert "torch.no_grad()" in told.value.hint
    with torch.no_grad():
        torch.testing.assert_close(program(rows, wanting), model(rows, wanting))
    with torch.inference_mode():
        torch.testing.assert_close(program(wanting, rows), model(wanting, rows))
    torch.testing.assert_close(program(rows, wanting.detach()), model(rows, wanting).detach())


class Returning(nn.Module):
    """Returns what it holds, most of which nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.rand(3))
        self.tied = self.weight
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("unkept", torch.rand(2), persistent=False)
        self.plain = torch.rand(1)

    def forward(self, rows: torch.Tensor) -> tuple[Any, ...]:
        return self.linear(rows), {"a": self.tied, "b": [self.kept, self.unkept]}, self.plain, self.linear.bias


@pytest.mark.parametrize("mode", ["piecewise", "trace_once"])
def test_a_returned_weight_that_nothing_reads_is_what_eager_gives(mode: str, tmp_path: Path) -> None:
    model, rows, store = Returning().requires_grad_(False).eval(), torch.rand(5, 4), pw.DiskStore(tmp_path)
    options = pw.CompileOptions(mode=mode, compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),))
    seen = pw.events.Recorder()
    program = pw.compile(model, (rows,), dynamic={"rows": {0: "tokens"}}, options=options, store=store)
    pw.compile(model, (rows,), dynamic={"rows": {0: "tokens"}}, options=options, store=store, observer=seen)
    assert seen.of(pw.events.RecordHit)
    assert program(rows)[1]["a"].data_ptr() == model.weight.data_ptr()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = pw.load(store, key=program.key, weights=weights)
    for call in (program, loaded):
        for size in (1, 5):
            torch.testing.assert_close(call(rows[:size]), model(rows[:size]))
    weights["weight"] += 1
    assert torch.equal(loaded(rows)[1]["a"], weights["weight"])
    with pytest.raises(BindError) as told:
        pw.load(store, key=program.key, weights={})
    assert told.value.hint.endswith("it holds no weight at all")


def forward_of(function: Callable[..., Any]) -> nn.Module:
    kind = type("Model", (nn.Module,), {"forward": function})
    return kind()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["backed", "oblivious", "unbacked"])
def test_a_dimension_that_the_model_fixes_is_told_in_the_words_of_dynamic(kind: str) -> None:
    def forward(self: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["rows"] + torch.ones(5, 4)  # fixed here

    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# fixed here" in text)
    dynamic = {"batch": {"rows": {0: pw.Dim("tokens", kind)}}}
    with pytest.raises(GuardError) as told:
        pw.compile(
            forward_of(forward), {"batch": {"rows": torch.rand(5, 4)}}, dynamic=dynamic, options=EAGER,
            store=pw.MemoryStore(),
        )  # fmt: skip
    error = told.value
    said = "dimension `tokens` (`batch['rows'].shape[0]`) is declared dynamic, and the model fixes it to `5`"
    assert error.message.startswith(said)
    assert f"test_calls.py:{line}" in error.message
    assert "leave dimension 0 of `batch['rows']` out of `dynamic`" in error.hint
    for leak in ("mark_dynamic", "Dim.AUTO", "L['", "kwargs"):
        assert leak not in str(error)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda self, rows: rows.missing(), "AttributeError: 'Tensor' object has no attribute 'missing'"),
        (lambda self, rows: rows.view(3, rows.shape[0]) + 1, "shape '[3, tokens]' is invalid for input of size"),
        (lambda self, rows: rows if rows.sum() > 0 else rows + 1, "it branches on the value of a tensor"),
        (lambda self, rows: list(range(int(rows.argmax()))) and rows, "a number that is known at run time only"),
    ],
)
def test_the_tracer_tells_nothing_of_its_own_tools(function: Any, said: str) -> None:
    with pytest.raises(TraceError) as told:
        pw.compile(
            forward_of(function), (torch.rand(5, 4),), dynamic={"rows": {0: "tokens"}}, options=EAGER,
            store=pw.MemoryStore(),
        )  # fmt: skip
    assert said in told.value.message and "test_calls.py:" in told.value.message
    for leak in ("torch._check", "Observed exception", "TensorVariable", "unhinted"):
        assert leak not in str(told.value)
