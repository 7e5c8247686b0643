"""What `explain --guards` says: each condition with its line and its proof, each value by the name it has in code."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import compile_case, rows
from piecework.diagnostics.explain import explain_guards
from piecework.diagnostics.explain_text import guard_lines
from piecework.stages.find import read_program
from piecework.values.sources import readable_source, readable_value


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.is_wide = 1e-5, True

    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x * x + self.eps) if self.is_wide else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * 2 if x.shape[0] > 16 else x


@pytest.fixture(scope="module")
def lines() -> list[str]:
    store = pw.MemoryStore()
    program = compile_case(Model(), rows(5), store=store)
    return guard_lines(explain_guards(read_program(program.key, store), store))


def test_a_condition_stands_with_its_proof_and_line(lines: list[str]) -> None:
    found = [line for line in lines if "16" in line and "x.shape[0] > 16" in line]
    assert len(found) == 1, lines
    assert re.search(r"holds: tried at every size, \d+ of them", found[0])
    assert re.search(r"test_explain_guards\.py:\d+", found[0])


def test_values_have_the_names_that_they_have_in_code(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert re.search(r"model\.layers\.0\.eps \(and 2 alike\) +1e-05 +test_explain_guards\.py:\d+", text), text
    assert re.search(r"model\.layers\.0\.is_wide \(and 2 alike\) +True", text), text
    assert not re.search(r"L\['|G\['|_modules", text), text


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("L['model']._modules['layers']._modules['0'].eps", "model.layers.0.eps"),
        ("L['model'].layers.0.eps", "model.layers.0.eps"),
        ("L['model']._buffers['table']", "model.table"),
        ("L['model'].__dict__['flag']", "model.flag"),
        ("L['model'].table['low']", "model.table['low']"),
        ("G['__import_torch_dot_nn_dot_functional'].silu", "torch.nn.functional.silu"),
        ("G['LIMIT']", "LIMIT"),
    ],
)
def test_names_of_the_tracer_are_turned_into_code(source: str, shown: str) -> None:
    assert readable_source(source) == shown


def test_values_are_written_as_in_code() -> None:
    assert readable_value("equal", "float:1e-05") == "1e-05"
    assert readable_value("equal", "str:'a:b'") == "'a:b'"
    assert readable_value("type", "torch.nn.modules.linear:Linear") == "Linear"
    assert readable_value("keys", "['a', 'b']") == "['a', 'b']"
