"""Evaluate guards, for debugging: nothing is proven, torch asks its guards at each call, and none is traced again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import assert_same, compile_case, rows
from piecework.api.folder import build_folder
from piecework.cli.main import run
from piecework.diagnostics.bisect import bisect
from piecework.errors import GuardError, InputError, OptionError, ShapeOutOfRange
from piecework.events import Recorder, RecordHit
from tiny_models import tiny_folder

ops = torch.ops.cases
HERE = re.escape(__file__)
LIVE = {"evaluate_guards": True}


class Divisible(nn.Module):
    """Right at no range of sizes: what the audit refuses, this mode serves as far as its guard holds."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x * 2 if x.shape[0] % 8 == 0 else x + 1)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x) * 2 if x.shape[0] > 16 else x + 1


class Two(nn.Module):
    def forward(self, batch: dict[str, list[Tensor]], y: Tensor | None = None) -> Tensor:
        x = batch["a"][1]
        if y is not None and x.shape[0] < y.shape[0]:
            return ops.fresh(x).sum(0) + y
        return ops.fresh(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.by = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.inner(ops.fresh(x)), -1) * self.by


def held(program: pw.Program, model: nn.Module, *given: Any) -> None:
    with torch.no_grad():
        assert_same(program(*given), model(*given))


def test_a_guard_that_fails_is_told_with_values_and_line_and_the_others_are_served() -> None:
    program, model = compile_case(Divisible(), rows(5), options=LIVE), Divisible()
    for size in (1, 2, 5, 7, 9, 13, 300):
        held(program, model, *rows(size))
    for size in (8, 64):
        with pytest.raises(GuardError) as raised:
            program(*rows(size))
        assert raised.value.facts["expression"] == "(tokens % 8) != 0"
        assert raised.value.facts["values"] == {"tokens": size}
        assert re.match(rf"{HERE}:\d+ \(return ops.fresh\(x \* 2 if x.shape", raised.value.facts["line"])
        assert f"this call has tokens={size}" in raised.value.message
    held(program, model, *rows(3))


def test_a_branch_is_not_split_and_the_other_side_fails() -> None:
    program = compile_case(Branches(), rows(30), options=LIVE)
    held(program, Branches(), *rows(16))
    with pytest.raises(GuardError, match=r"only where `.*tokens <= 16` \(at .*\); this call has tokens=17"):
        program(*rows(17))
    assert len(program.sides) == 1


def test_a_guard_on_two_sizes_deep_in_the_arguments() -> None:
    def make(one: int, two: int) -> tuple[Any, Tensor]:
        return {"a": [torch.rand(2), torch.rand(one, 4)]}, torch.rand(two, 4)

    dynamic = {"batch": {"a": {1: {0: "tokens"}}}, "y": {0: "others"}}
    program = compile_case(Two(), make(3, 5), dynamic=dynamic, options=LIVE)
    sizes = {"tokens": 13, "others": 11}
    right, wrong = ((20, 9), (9, 20)) if sizes["tokens"] > sizes["others"] else ((9, 20), (20, 9))
    failing = wrong
    try:
        held(program, Two(), *make(*right))
    except GuardError:
        failing = right
        held(program, Two(), *make(*wrong))
    with pytest.raises(GuardError) as raised:
        program(*make(*failing))
    assert raised.value.facts["values"] == {"tokens": failing[0], "others": failing[1]}
    assert re.fullmatch(r"(tokens|others) (>|<|>=|<=) (tokens|others)", raised.value.facts["expression"])


def test_only_guards_on_sizes_are_live() -> None:
    model = Scaled()
    program = compile_case(model, rows(5), options=LIVE)
    held(program, model, *rows(7))
    model.by = 3.0
    x = rows(7)[0]
    with torch.no_grad():
        assert torch.allclose(program(x) * 1.5, model(x))
    assert any("by" in finding for finding in program.check())


def test_other_faults_of_a_call_are_told_as_ever() -> None:
    program = compile_case(Branches(), rows(5), options={**LIVE, "ranges": ((1, 64),), "max_num_batched_tokens": 64})
    for size in (0, 65):
        with pytest.raises(ShapeOutOfRange, match=f"`tokens` is `{size}`"):
            program(*rows(size))
    with pytest.raises(InputError, match="argument `x` has dtype `float64`"):
        program(torch.rand(5, 4).double())
    with pytest.raises(InputError, match="argument `x` is missing"):
        program(None)
    with pytest.raises((InputError, TypeError)):
        program()
    held(program, Branches(), *rows(7))


def test_a_program_without_guards_on_sizes_is_served_at_every_size_and_found_again() -> None:
    model, store, recorder = Scaled(), pw.MemoryStore(), Recorder()
    compile_case(model, rows(5), options=LIVE, store=store)
    warm = compile_case(model, rows(5), options=LIVE, store=store, observer=recorder)
    assert recorder.of(RecordHit)
    for size in (1, 2, 64, 300):
        held(warm, model, *rows(size))
    warm.refresh()
    held(warm, model, *rows(3))


def test_what_is_not_proven_shares_no_record_with_what_is() -> None:
    store, model = pw.MemoryStore(), Branches()
    live = compile_case(model, rows(5), options=LIVE, store=store)
    proven = compile_case(model, rows(5), store=store)
    assert live.key != proven.key
    held(proven, model, *rows(17))


def test_torch_forgetting_the_trace_is_an_error_and_no_second_trace() -> None:
    program = compile_case(Divisible(), rows(5), options=LIVE)
    torch._dynamo.reset()
    with pytest.raises(GuardError, match="torch forgot the trace whose guards are evaluated"):
        program(*rows(7))


def test_a_model_folder_is_served_through_its_guards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny_folder("llama", tmp_path))
    command = ["generate", folder, "--prompt-ids", "1,2,3,4,5", "--max-tokens", "3", "--store", "memory", "--json"]
    texts = []
    for more in ([], ["-cc.evaluate_guards=true"]):
        assert run([*command, "--compiler", "eager", *more]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0]["completions"] == texts[1]["completions"], texts
    assert run(["build", folder, "--store", "memory", "-cc.evaluate_guards=true"]) == 2
    assert "`evaluate_guards` has no meaning there" in capsys.readouterr().err


def test_unbacked_dimensions_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="dimension `tokens`, which is declared `unbacked`"):
        compile_case(Scaled(), rows(5), options=LIVE, dynamic={"x": {0: pw.Dim("tokens", "unbacked")}})


def test_direct_dispatch_is_refused_by_name() -> None:
    store, model = pw.MemoryStore(), Scaled()
    program = compile_case(model, rows(5), options=LIVE, store=store)
    with pytest.raises(OptionError, match="a capture replays by direct dispatch.*`evaluate_guards`"):
        pw.capture(program, device="dry")
    with pytest.raises(OptionError, match="a program that is loaded is called by direct dispatch.*`evaluate_guards`"):
        pw.load(store, key=program.key, weights=program.weights)
    with pytest.raises(OptionError, match="what is bisected is called by direct dispatch"):
        bisect(model, rows(5), options=pw.CompileOptions(compiler="eager", **LIVE))
    with pytest.raises(OptionError, match="what is built into a store is called by direct dispatch"):
        build_folder("anywhere", options=pw.CompileOptions(compiler="eager", **LIVE))
    for mode in ("none", "stock"):
        with pytest.raises(OptionError, match=f"`evaluate_guards` has no meaning in mode `{mode}`"):
            pw.CompileOptions(mode=mode, **LIVE)


class Squeezes(nn.Module):
    """Has another rank at one row, and decides by it."""

    def forward(self, x: Tensor) -> Tensor:
        y = ops.fresh(x).squeeze()
        return y * 2 if y.dim() == 2 else y + 100


def test_what_a_squeeze_asks_is_evaluated_too() -> None:
    program = compile_case(Squeezes(), rows(5), options=LIVE)
    held(program, Squeezes(), *rows(7))
    with pytest.raises(
        GuardError, match=r"right only where `(Ne\(tokens, 1\)|tokens != 1)` .*this call has tokens=1"
    ) as raised:
        program(*rows(1))
    assert "squeeze" in raised.value.facts["line"]
