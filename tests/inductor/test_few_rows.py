"""Products of few rows: the kernel gives what float64 gives, whatever the sizes; what it cannot read is left alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.compilers.inductor import InductorCompiler
from piecework.seam.few_rows import NAME, use_few_rows
from piecework.seam.loader import load
from piecework.values.digest import digest_bytes
from piecework.values.shapes import Range
from piecework.values.signature import parse_spec

LINEAR = '''def piece(
    s0: "int",
    x0: "float32[s0, 19] cpu",
    w0: "weight float32[7, 19] cpu",
    w1: "weight float32[7] cpu",
):
    v0 = torch.nn.functional.linear(x0, w0, w1)
    return (v0,)
'''
TEXT = """\
def prepare(w0):
    c0 = reinterpret_tensor(w0, (19, 7), (1, 19), 0)
    return {"c0": c0}


def call(s0, x0, x1):
    buf0 = empty_strided_cpu((s0, 7), (7, 1), float32)
    {PRODUCT}
    return (buf0,)
"""
SPECS = {
    "x0": "float32[s0, 19] cpu",
    "x1": "float32[s0, 7] cpu",
    "w0": "weight float32[7, 19] cpu",
    "w1": "weight float32[7] cpu",
}


def rewritten(product: str, isa: str = "avx512", **specs: str) -> str:
    known = {name: parse_spec(text) for name, text in (SPECS | specs).items()}
    text, _ = use_few_rows(TEXT.replace("{PRODUCT}", product), known, {"s0": Range(2, 64)}, isa)
    return text.splitlines()[7].strip()


@pytest.mark.parametrize("threads", [1, 2])
def test_every_number_of_rows_equals_float64(threads: int, tmp_path: Path) -> None:
    """From one row to those that take the general product, in widths and depths that no lane divides."""
    for width, depth in ((7, 19), (1, 1), (48, 64), (331, 401)):
        text = LINEAR.replace("[7", f"[{width}").replace("19", str(depth))
        compiler = InductorCompiler(threads=threads, working_folder=str(tmp_path))
        artifact = compiler.compile(text, {"s0": Range(2, 64)})
        assert (artifact.facts["few_rows"], NAME in artifact.kernels) == (1, True)
        for data in artifact.kernels.values():
            path = tmp_path / f"{digest_bytes(data)}.so"
            if not path.exists():  # a library that is loaded is not written to
                path.write_bytes(data)
        w, b = torch.randn(width, depth), torch.randn(width)
        call = load(artifact, kernel_path=lambda digest: tmp_path / f"{digest}.so").bind([w, b])
        for rows in (2, 3, 5, 7, 8, 9, 12, 16, 17, 31, 33, 64):
            x = torch.randn(rows, depth)
            right = torch.nn.functional.linear(x.double(), w.double(), b.double())
            torch.testing.assert_close(call(rows, x)[0].double(), right, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_who_shares_the_step(tmp_path: Path) -> None:
    model, rows = nn.Linear(33, 17), torch.randn(16, 33)
    options = pw.CompileOptions(max_num_batched_tokens=64, ranges=((1, 64),))
    program = pw.compile(model, (rows,), dynamic={"input": {0: "n"}}, options=options, store=pw.MemoryStore())
    whole = program(rows)
    for first, last in itertools.combinations(range(0, 17, 3), 2):
        assert torch.equal(program(rows[first:last].contiguous()), whole[first:last])


@pytest.mark.parametrize(
    ("product", "right"),
    [
        (
            "mm(x0, c0, out=buf0)",
            "few_rows(x0, c0, 0, buf0, s0, 7, 19, 19, 0, 7) if s0 <= 32 else mm(x0, c0, out=buf0)",
        ),
        (
            "addmm(w1, x0, c0, out=buf0)",
            "few_rows(x0, c0, w1, buf0, s0, 7, 19, 19, 0, 7) if s0 <= 32 else addmm(w1, x0, c0, out=buf0)",
        ),
        (
            "addmm(x1, x0, c0, out=buf0)",
            "few_rows(x0, c0, x1, buf0, s0, 7, 19, 19, 7, 7) if s0 <= 32 else addmm(x1, x0, c0, out=buf0)",
        ),
        (
            "mm(reinterpret_tensor(x0, (s0, 19), (38, 1), 19), c0, out=buf0)",
            "few_rows(reinterpret_tensor(x0, (s0, 19), (38, 1), 19), c0, 0, buf0, s0, 7, 19, 38, 0, 7) if s0 <= 32 "
            "else mm(reinterpret_tensor(x0, (s0, 19), (38, 1), 19), c0, out=buf0)",
        ),
    ],
)
def test_what_is_written(product: str, right: str) -> None:
    assert rewritten(product) == right


@pytest.mark.parametrize(
    ("product", "more"),
    [
        ("mm(x0, c0, out=buf0)", {"x0": "bfloat16[s0, 19] cpu"}),
        ("mm(x0, c0, out=buf0)", {"w0": "weight bfloat16[7, 19] cpu"}),
        ("mm(x0, c0, out=buf0)", {"x0": "float32[s0, 19] strides[1, s0] cpu"}),
        ("mm(x0, reinterpret_tensor(w0, (19, 7), (7, 1), 0), out=buf0)", {}),
        ("mm(x9, c0, out=buf0)", {}),
        ("mm(x0, c0, out=buf9)", {}),
        ("mm(reinterpret_tensor(x0, (2 * s0, 19), (19, 1), 0), c0, out=buf0)", {}),
        ("addmm(x1, x0, c0, alpha=2, out=buf0)", {}),
        ("addmm(x1, x0, c0, out=buf0)", {"x1": "float32[s0, 7] strides[1, s0] cpu"}),
        ("addmm(x1, x0, c0, out=buf0)", {"x1": "bfloat16[s0, 7] cpu"}),
    ],
)
def test_what_lies_otherwise_is_left_alone(product: str, more: dict[str, str]) -> None:
    assert rewritten(product, **more) == product


def test_a_processor_it_was_not_measured_on_is_left_alone() -> None:
    assert rewritten("mm(x0, c0, out=buf0)", isa="neon") == "mm(x0, c0, out=buf0)"


class Rows(nn.Module):
    """Two products in a row, a sum over a copy with wider rows, and a weight that stands the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)
        self.turned = nn.Parameter(torch.randn(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x, self.down(torch.relu(self.up(x)))], dim=-1)
        return self.up(wide[:, 24:]) @ self.up.weight + x @ self.turned


@pytest.mark.parametrize("size_one", [True, False])
def test_a_model_of_many_products(size_one: bool) -> None:
    model, settings = Rows(), {"max_num_batched_tokens": 40, "size_one": size_one}
    low = 1 if size_one else 2
    options = pw.CompileOptions(ranges=((low, 40),), **settings)
    given: dict[str, Any] = {"options": options, "store": pw.MemoryStore()}
    program = pw.compile(model, (torch.randn(4, 24),), dynamic={"x": {0: "n"}}, **given)
    exact = Rows().double()
    exact.load_state_dict(model.state_dict())
    for rows in [*range(low, 20), 40]:
        for _ in range(4):  # from the third on, steps of one size run in memory of their own
            x = torch.randn(rows, 24)
            torch.testing.assert_close(program(x).double(), exact(x.double()), rtol=2e-4, atol=2e-4)
