"""Small models made by chance: what decides nothing by size is served, the rest is refused with a line or equal."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as count_from
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

from case_operators import assert_same, compile_case, rows
from piecework.errors import GuardError, PieceworkError, ShapeOutOfRange, TraceError
from piecework.runtime.program import Program

HIGH = 72
_numbers = count_from()
HEAD = """import math

import torch
from torch import nn
import torch.nn.functional as functional

ops = torch.ops.cases


class Generated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.count = 2
        self.is_wide = True
        self.table = {"low": 0.5, "high": 2.0, 8: 3.0, 40: 0.25}
        self.factors = [0.5, 1.5, 2.5]

    def forward(self, x):
        h = x
        n = x.shape[0]
"""
# Every step leaves `h` with n rows of four. `{k}` is a small number, `{m}` one within the sizes, `{a}` an attribute.
FREE = [
    "h = torch.relu(h - {k}) + 0.5",
    "h = functional.silu(h) * self.scale",
    "h = self.inner(h)",
    "h = h - h.mean(1, keepdim=True)",
    "h = torch.softmax(h, {d})",
    "h = h + h.sum(0)",
    "h = h + h.amax({d}, keepdim=True)",
    "h = h + torch.cumsum(h, {d}) / (n + {k})",
    "h = h.view(n, 2, 2).transpose(1, 2).reshape(n, 4)",
    "h = h.flatten().view(-1, 4)",
    "h = h.t().contiguous().t() + {k}",
    "h = h.unsqueeze(0).expand({k}, -1, -1).sum(0)",
    "h = torch.stack([h, h * 2], 1).view(2 * n, 4)[:n]",
    "h = torch.cat([h, h.new_zeros({k}, 4)])[{k}:]",
    "h = h / n",
    "h = h * (n // {k} + 1) - n % {k}",
    "h = h + torch.arange(n, device=h.device)[:, None]",
    "h = h + h.new_full((n, 1), {k}) * (n * {k} - 1)",
    "h = h.repeat({k}, 1)[n * {k} - n :]",
    "h = torch.cat([h, h])[n - 1 : 2 * n - 1]",
    "h = h + h[n - 1]",
    "h = h.flip(0) + h.roll(1, 0)",
    "h = (h @ h.t()) @ h / (n * n)",
    "h = torch.where(h > 1, h, -h)",
    "h = h * self.table[{a}] if self.is_wide else h + 1",
    "for factor in self.factors[:{k}]:\n            h = h * factor",
    "for _ in range(self.count):\n            h = h + 1",
    "h = ops.fresh(h)",
    "a, b = ops.two(h)\n        h = a * b",
    "h = ops.sized(h, n + {k})",
    "o = torch.empty_like(h)\n        ops.into(h, o)\n        h = o + h",
    "h = h.split([1, 3], 1)[1].mean(1, keepdim=True) * h",
    "h = functional.pad(h, (0, 0, {k}, 0))[{k}:]",
    "h = h * int(n * 0.7) + round(n / {k})",
    "h = h + h[: math.ceil(n / {k})].sum(0)",
    "h = h * math.trunc(n / 3) - n**0.5 + math.floor(n * 0.1 * 10)",
    "h = h * torch.tensor([n / {k}, 1.0, 2.0, n])",
    "whole, rest = divmod(n, {k} + 1)\n        h = h * whole - rest",
]
BOUND = [
    "if n > {m}:\n            h = ops.fresh(h)",
    "h = h * 2 if n == {m} else h - 1",
    "if {k} < n <= {m}:\n            h = torch.softmax(h, 0)\n        else:\n            h = h.flip(0)",
    "if n % {k} == 0:\n            h = h + 1",
    "h = h + h[: min(n, {m})].sum(0)",
    "h = h + h.new_ones(max(n, {m}), 4)[:n]",
    "h = h + h.view(n // {k}, {k}, 4).sum((0, 1))",
    "h = h + h[{m}]",
    "h = h + h[: n // {k}].sum(0)",
    "h = functional.pad(h, (0, 0, 0, -n % {k}))[:n]",
    "h = h + h[-{k}:].sum(0)",
    "for row in range(n):\n            h = h + row",
    "h = h * next(factor for limit, factor in ((8, 0.5), (40, 2.0), (4096, 3.0)) if n <= limit)",
    "h = h * self.table.get(n, 1.5)",
    "h = h if h.numel() < {m} else h * 2",
    "h = torch.cat(h.chunk({k}))",
    "h = h.view(1, -1, 4).expand(1, n, 4).squeeze()",
    "h = h * (3 if n % 2 and n > {m} else 5)",
    "h = h * 2 if n**0.5 > {k} else h + 1",
    "h = h * 2 if n * 0.1 * 10 >= {m} else h + 1",
    "h = torch.cat([ops.fresh(part) for part in h.tensor_split({k})])",
]


@dataclass(frozen=True)
class Generated:
    """A model's source, and whether it takes any decision from a size."""

    source: str
    decides: bool


def _steps(templates: list[str]) -> SearchStrategy[str]:
    return st.builds(
        lambda text, k, m, d, a: text.format(k=k, m=m, d=d, a=a),
        st.sampled_from(templates),
        st.integers(1, 5),
        st.integers(2, HIGH - 1),
        st.integers(0, 1),
        st.sampled_from(['"low"', '"high"', "8"]),
    )


def _source(steps: list[str]) -> str:
    return HEAD + "".join(f"        {step}\n" for step in steps) + "        return h\n"


MODELS: SearchStrategy[Generated] = st.one_of(
    st.lists(_steps(FREE), min_size=3, max_size=7).map(lambda steps: Generated(_source(steps), decides=False)),
    st.tuples(
        st.lists(_steps(FREE), min_size=1, max_size=3),
        st.lists(_steps(BOUND), min_size=1, max_size=2),
        st.lists(_steps(FREE), min_size=0, max_size=2),
    ).map(lambda parts: Generated(_source([*parts[0], *parts[1], *parts[2]]), decides=True)),
)


def serve(model: nn.Module, generated: Generated, file: str) -> Program | None:
    """Compile a generated model; None where it was refused, with a line, and is one that may be."""
    options = {"ranges": ((1, HIGH),), "max_num_batched_tokens": HIGH}
    try:
        return compile_case(model, rows(5), options=options)
    except PieceworkError as error:
        assert isinstance(error, GuardError | TraceError), generated.source
        assert generated.decides, f"{error}\n{generated.source}"
        said = f"{error.message} {error.facts.get('file', '')}:{error.facts.get('line', '')}"
        assert re.search(rf"{re.escape(file)}:\d+", said), f"no line: {error}\n{generated.source}"
        assert error.hint, generated.source
        return None


def check(generated: Generated, folder: Path) -> str:
    """Hold a generated model to its one right outcome; return which it was."""
    name = f"generated_{next(_numbers)}"
    file = folder / f"{name}.py"
    file.write_text(generated.source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # the tracer looks functions up by name
    try:
        spec.loader.exec_module(module)
        return _check(module.Generated, generated, str(file))
    finally:
        del sys.modules[name]


def _check(kind: type[nn.Module], generated: Generated, file: str) -> str:
    torch.manual_seed(0)
    model = kind()
    program = serve(model, generated, file)
    if program is None:
        return "refused"
    with pytest.raises(ShapeOutOfRange):
        program(*rows(0))
    for size in range(1, HIGH + 1):
        (x,) = rows(size)
        own: Tensor = x.clone()
        with torch.no_grad():
            expected = model(own)  # where eager fails, serving is wrong: this raises
        try:
            assert_same(program(x), expected)
        except AssertionError as error:
            raise AssertionError(f"size {size}: {error}\n{generated.source}") from error
        assert torch.equal(x, own)
    with pytest.raises(ShapeOutOfRange):
        program(*rows(HIGH + 1))
    return f"{len(program.sides)} sides"


def _run(count: int) -> Callable[[], None]:
    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(MODELS)
    def run(generated: Generated) -> None:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(check(generated, Path(folder)))

    outcomes: list[str] = []

    def every() -> None:
        run()
        assert len(outcomes) >= count
        assert len(set(outcomes)) > 1, "models of one kind only"

    return every


def test_generated_models() -> None:
    _run(10)()


@pytest.mark.soak
def test_many_generated_models() -> None:
    _run(40)()


@pytest.mark.parametrize("size", [1, 2, 7, 13, 17, 41, 64])
def test_a_size_of_its_own_is_served_whichever_is_traced(size: int, tmp_path: Path) -> None:
    step = f"h = h * 2 if n == {size} else h - 1"
    assert check(Generated(_source([step]), decides=False), tmp_path) in ("2 sides", "3 sides")


@pytest.mark.parametrize("step", FREE)
@pytest.mark.soak
def test_each_free_step_alone(step: str, tmp_path: Path) -> None:
    for k, d in ((1, 0), (3, 1)):
        text = _source([step.format(k=k, m=17, d=d, a='"low"')])
        assert check(Generated(text, decides=False), tmp_path) != "refused"


@pytest.mark.parametrize("step", BOUND)
@pytest.mark.soak
def test_each_bound_step_alone(step: str, tmp_path: Path) -> None:
    for k, m in ((2, 17), (3, 40)):
        check(Generated(_source(["h = h * 1.5", step.format(k=k, m=m, d=0, a='"low"')]), decides=True), tmp_path)
