"""Opaque operators that give sizes which their data decides: they cross cuts alone and in tuples."""

import pytest
import torch
from torch import nn

import piecework as pw


def _fake_rows(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x[:, 0] > 0).flatten()


_library = torch.library.Library("datadependent", "FRAGMENT")
for _schema, _body, _fake in (
    ("rows(Tensor x) -> Tensor", _rows, _fake_rows),
    (
        "rows_and_double(Tensor x) -> (Tensor, Tensor)",
        lambda x: (_rows(x), x * 2),
        lambda x: (_fake_rows(x), torch.empty_like(x)),
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _body, "CPU")
    torch.library.register_fake(f"datadependent::{_name}", _fake, lib=_library)
    pw.split_op(f"datadependent::{_name}")(_body)
_ops = torch.ops.datadependent


class Alone(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[_ops.rows(x)].sum(0)


class InTuple(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, doubled = _ops.rows_and_double(x)
        return doubled[rows].sum(0)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("model", [Alone, InTuple])
def test_a_size_that_data_decides_crosses_a_cut(model: type[nn.Module], compiler: str) -> None:
    module = model()
    options = pw.CompileOptions(compiler=compiler, ranges=((1, 16),), max_num_batched_tokens=16)
    program = pw.compile(module, (torch.randn(5, 4),), dynamic={"x": {0: "T"}}, options=options, store=pw.MemoryStore())
    for count in (1, 2, 7, 16):
        for sign in (1, -1, 0):  # every row, none, some
            x = torch.randn(count, 4)
            if sign:
                x[:, 0] = sign * x[:, 0].abs()
            torch.testing.assert_close(program(x), module(x))
