"""Which operators are cut at, and what of an opaque call belongs to a piece's identity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import SPLIT, assert_serves, calls, compile_case, rows
from piecework.errors import OptionError, SplitError
from piecework.events import ArtifactCompiled, Recorder, RecordHit, SplitDone
from piecework.values.declaration import SplitOp, SplitRegistry

ops = torch.ops.cases


class Layered(nn.Module):
    """Layers that call an operator by name; each has a norm with its own epsilon."""

    def __init__(self, layers: int = 6, prefix: str = "layers", odd: float = 1e-6) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(4)) for _ in range(layers))
        self.names = [f"{prefix}.{index}" for index in range(layers)]
        self.epsilons = [odd if index == 3 else 1e-6 for index in range(layers)]

    def forward(self, x: Tensor) -> Tensor:
        for weight, name, epsilon in zip(self.weights, self.names, self.epsilons, strict=True):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight
            x = ops.named(x, name)
        return x


def distinct(model: nn.Module) -> tuple[int, int]:
    recorder = Recorder()
    compile_case(model, rows(5), observer=recorder)
    done = recorder.of(SplitDone)[0]
    return done.sites, done.distinct


def test_names_make_no_piece_and_epsilon_does() -> None:
    assert distinct(Layered()) == (6, 1)
    assert distinct(Layered(odd=1e-5)) == (6, 2)


def test_each_site_passes_its_own_name() -> None:
    program = assert_serves(Layered(), rows)
    calls.clear()
    program(*rows(7))
    assert calls == [f"layers.{index}" for index in range(6)]


def test_two_models_with_other_names_in_one_store() -> None:
    store = pw.MemoryStore()
    one, two = Layered(prefix="a"), Layered(prefix="b")
    first = compile_case(one, rows(5), store=store)
    recorder = Recorder()
    second = compile_case(two, rows(5), store=store, observer=recorder)
    assert (recorder.of(RecordHit), recorder.of(ArtifactCompiled)) == ([], [])
    for program, prefix in ((first, "a"), (second, "b"), (first, "a")):
        calls.clear()
        program(*rows(3))
        assert calls == [f"{prefix}.{index}" for index in range(6)]


def test_memory_that_comes_fresh_with_each_call() -> None:
    class After(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(ops.fresh(x)) + 1

    program, kept = compile_case(After(), rows(5)), []
    for _ in range(20):
        x = rows(7)[0]
        kept.append((program(x), After()(x), torch.rand(1000)))
    assert all(torch.equal(got, expected) for got, expected, _ in kept)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cases::frehs", "did you mean `cases::fresh`?"),
        ("case::fresh", "did you mean `cases::fresh`?"),
        ("none::such", "import the module"),
    ],
)
def test_an_unknown_operator_is_named_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(OptionError, match=f"split operator `{name}` is not registered") as raised:
        compile_case(Layered(), rows(5), options={"split_ops": (*SPLIT, name)})
    assert near in raised.value.hint


def test_an_overload_may_be_named() -> None:
    recorder = Recorder()
    compile_case(Layered(), rows(5), options={"split_ops": ("cases::named.default",)}, observer=recorder)
    assert recorder.of(SplitDone)[0].opaque == 6


def test_an_empty_list_means_the_whole_graph() -> None:
    recorder = Recorder()
    options = {"split_ops": (), "split_ops_only": ()}
    program = compile_case(Layered(), rows(5), options=options, observer=recorder)
    done = recorder.of(SplitDone)[0]
    assert (done.regions, done.opaque, done.sites) == (1, 0, 1)
    x = rows(7)[0]
    assert torch.equal(program(x), Layered.forward(_with(program, Layered()), x))


def _with(program: pw.Program, model: nn.Module) -> nn.Module:
    model.load_state_dict(program.weights)
    return model


def test_declaring_an_operator_after_it_was_traced_raises() -> None:
    registry = SplitRegistry()
    registry.add(SplitOp("early::op", "m"))
    registry.freeze({"late::op", "early::op"})
    registry.add(SplitOp("other::op", "m"))
    with pytest.raises(SplitError, match="`late::op` is declared a split point after a graph that calls it was traced"):
        registry.add(SplitOp("late::op", "m"))


MODULE = """
import torch
import piecework as pw
library = torch.library.Library("{space}", "FRAGMENT")
library.define("op(Tensor x) -> Tensor")

@pw.split_op("{space}::op")
def body(x):
    return x + {add}

library.impl("op", body, "CPU")
torch.library.register_fake("{space}::op", lambda x: torch.empty_like(x), lib=library)
"""
MAIN = """
import importlib, sys, torch, piecework as pw
for name in sys.argv[2:]:
    importlib.import_module(name)

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.one_space.op(x * 2) + torch.ops.two_space.op(x)

program = pw.compile(Model(), (torch.ones(5, 4),), dynamic={"x": {0: "tokens"}},
                     options=pw.CompileOptions(compiler="eager"), store=pw.DiskStore(sys.argv[1]))
assert torch.equal(program(torch.ones(3, 4)), torch.full((3, 4), 6.0))
print(program.key)
"""
LOAD = """
import sys, torch, piecework as pw
{imports}
program = pw.load(pw.DiskStore(sys.argv[1]), key=sys.argv[2], weights={{}})
print(program(torch.ones(3, 4)).sum().item())
"""


def run(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "main.py").write_text(text)
    command = [sys.executable, str(folder / "main.py"), str(folder / "store"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_import_order_makes_no_key_and_a_lacking_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "one_module.py").write_text(MODULE.format(space="one_space", add=1))
    (tmp_path / "two_module.py").write_text(MODULE.format(space="two_space", add=2))
    keys = []
    for order in (("one_module", "two_module"), ("two_module", "one_module")):
        done = run(tmp_path, MAIN, *order)
        assert done.returncode == 0, done.stderr
        keys.append(done.stdout.strip())
    assert keys[0] == keys[1]
    done = run(tmp_path, LOAD.format(imports="import one_module, two_module"), keys[0])
    assert done.stdout.strip() == "72.0", done.stderr
    done = run(tmp_path, LOAD.format(imports="import one_module"), keys[0])
    assert "BindError: operator `two_space::op` is not registered here" in done.stderr
    assert "hint: import `two_module` first" in done.stderr
