"""Pairs: what must change the key and what must not, each tried by a real change of a start in a process of its own.

Changes that a process can make and undo share one; whatever a process is born with (variables, the files of its code,
its place) has its own. What must not change the key is tried all at once as well: if the sum of it changes nothing, no
part of it does.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from toy_box import Process, run_starts, write_package

OBJECT = """
from piecework.compilers.eager import EagerCompiler
class Own(EagerCompiler):
    name, version = "own", "{version}"
chosen["compiler"] = Own()
"""

PASS = """
from piecework.values.rewriting import Rewritten
@pw.graph_pass("own", version={version})
def own(graph):
    return Rewritten(graph, ())
chosen["passes"] = (own,)
"""

# Head -> what is changed -> a start that differs from the first in that alone.
WITHIN: dict[str, dict[str, dict[str, Any]]] = {
    "environment": {
        "matmul precision": {
            "run": "torch.set_float32_matmul_precision('high')", "undo": "torch.set_float32_matmul_precision('highest')"
        },
        "deterministic algorithms": {
            "run": "torch.use_deterministic_algorithms(True)", "undo": "torch.use_deterministic_algorithms(False)"
        },
        "oneDNN": {
            "run": "torch.backends.mkldnn.enabled = False", "undo": "torch.backends.mkldnn.enabled = True"
        },
    },
    "config": {
        "a width": {"config": {"width": 24}},
        "bias": {"config": {"bias": True}},
        "layers": {"config": {"layers": 3}},
        "an epsilon": {"config": {"epsilon": 1e-3}},
        "a number that a layer holds": {"patch": {"model.layers.2.feed_forward.scale": 2}},
        "the weights' dtype": {"run": "model = model.double()"},
        "the mode of a module": {"run": "model.layers[1].train()"},
        "the inputs' dtype": {"run": "tokens = tokens.int()"},
        "the split list": {"options": {"split_ops": ["toybox::second"]}},
        "the split list, replaced": {"options": {"split_ops_only": ["toybox::second"]}},
        "merging": {"options": {"merge_consecutive": False}},
        "ranges": {"options": {"ranges": [[1, 32], [33, 64]]}},
        "single sizes": {"options": {"single_sizes": [7]}},
        "the largest size": {"options": {"max_num_batched_tokens": 48}},
        "size 1": {"options": {"size_one": False}},
        "the mode": {"options": {"mode": "trace_once"}},
    },
    "code": {
        "a function that was patched": {
            "patch": {"toybox.mlp.gate": "def gate(left, right):\n    return torch.relu(left) * right\n"},
            "undo": "sys.modules['toybox.mlp'].gate = sys.modules['toybox.gates'].gate",
        },
        "a flag of a module": {
            "patch": {"toybox.gates.USE_GELU": True}, "undo": "sys.modules['toybox.gates'].USE_GELU = False"
        },
        "the passes": {"options": {"passes": ["no_ops"]}},
        "a pass of one's own": {"run": PASS.format(version="1")},
        "its next version": {"run": PASS.format(version="2")},
        "a module's class": {
            "run": "model.norm.__class__ = type('Other', (type(model.norm),), {'__module__': 'toybox.model'})"
        },
    },
    "compiler": {
        "its name": {"options": {"compiler": "aot_eager"}},
        "a compiler's version": {"run": OBJECT.format(version="1")},
        "a compiler's next version": {"run": OBJECT.format(version="2")},
        "the default dtype": {
            "run": "torch.set_default_dtype(torch.float64)", "undo": "torch.set_default_dtype(torch.float32)"
        },
    },
}  # fmt: skip
VARIABLES = {
    "TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE": "64",
    "TORCHINDUCTOR_CPP_MAX_HORIZONTAL_FUSION_SIZE": "1",
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1",
    "TORCHINDUCTOR_CPP_MARCH": "x86-64-v2",
    "ATEN_CPU_CAPABILITY": "default",  # of the compiler's head: the instruction set that is used
}
EDITS = {
    "a helper that forward calls": {"gates.py": ("functional.silu(left) *", "0.5 * functional.silu(left) *")},
    "a number in forward": {"model.py": ("hidden.pow(2)", "hidden.pow(4)")},
    "an operator's fake": {
        "ops.py": ("lambda query: torch.empty_like(query)", "lambda query: query.new_empty(query.shape)")
    },
    "an operator's schema": {
        "ops.py": ('"second(Tensor query) -> Tensor"', '"second(Tensor query, int n=1) -> Tensor"')
    },
}
# What a start is surrounded with, and the options that are no part of the key.
PLACES = {
    "HOSTNAME": "elsewhere", "USER": "nobody", "LOGNAME": "nobody", "PYTHONHASHSEED": "2", "UNRELATED": "1",
    "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501",
    "TZ": "Asia/Tokyo", "TERM": "dumb", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_SIZE_ASSERTS": "0", "TORCHINDUCTOR_FREEZING": "1",
    "CUDA_VISIBLE_DEVICES": "", "TRITON_F32_DEFAULT": "ieee", "CXX": "no-such-compiler", "MAKEFLAGS": "-j4",
}  # fmt: skip
UNKEYED = {
    "strict": True, "verify": False, "compile_threads": 1, "compile_budget_s": 100.0, "drift_every": 3,
}  # fmt: skip
SAME: dict[str, dict[str, Any]] = {
    "as it is": {},
    "options that are not keyed": {"options": UNKEYED},
    "other weights": {"run": "with torch.no_grad():\n    [p.mul_(0.5) for p in model.parameters()]"},
    "gradients": {"run": "[p.requires_grad_(False) for p in model.parameters()]"},
    "another example size": {"run": "tokens = torch.arange(9)"},
    "threads": {"run": "torch.set_num_interop_threads(2)"},
    "a setting of the compiler made in code": {
        "run": "import torch._inductor.config as c; c.epilogue_fusion = False", "undo": "c.epilogue_fusion = True"
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def first(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Process]:
    """A store filled by one process with the start as it is and, after it, each change that a process can make."""
    store = tmp_path_factory.mktemp("first") / "store"
    starts = [{}, *(start for changes in WITHIN.values() for start in changes.values())]
    return store, run_starts(folder, store, starts, PYTHONHASHSEED="1")


def keys_of(process: Process) -> list[str]:
    return [start.key for start in process.starts]


def test_each_change_has_a_key_of_its_own(first: tuple[Path, Process]) -> None:
    names = ["as it is", *(f"{head}: {name}" for head, changes in WITHIN.items() for name in changes)]
    for name, start in zip(names, first[1].starts, strict=True):
        assert not start.is_hit, f"{name} is served by another's record"
        assert start.has_traced, name
        assert start.difference < 1e-5, name
    assert len(set(keys_of(first[1]))) == len(names)


def test_there_are_pairs_enough() -> None:
    """At least three changes under each head, and more than both of the counts that are promised."""
    heads = {head: len(changes) for head, changes in WITHIN.items()}
    heads["environment"] += len(VARIABLES) - 1
    heads["code"] += len(EDITS)
    heads["compiler"] += 1
    assert min(heads.values()) >= 3
    assert sum(heads.values()) >= 25
    assert len(PLACES) + len(UNKEYED) + len(SAME) - 1 >= 15


def test_nothing_of_place_is_keyed(
    first: tuple[Path, Process], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Another process, elsewhere in every respect at once: moved code, moved store, other variables, touched files."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    store = elsewhere / "moved"
    shutil.copytree(first[0], store)
    code = elsewhere / "code"
    shutil.copytree(folder, code)
    for path in code.rglob("*.py"):
        os.utime(path, (1, 1))
    with open(code / "toybox/ops.py", "a", encoding="utf-8") as file:  # no trace reads an operator's body
        file.write("\n\ndef unused():\n    return 3\n")
    source = (code / "toybox/ops.py").read_text()
    assert "value.cumsum(0)" in source
    (code / "toybox/ops.py").write_text(source.replace("value.cumsum(0)", "value.cumsum(0) * 0.5"))
    cwd = elsewhere / "somewhere"
    cwd.mkdir()
    again = run_starts(
        code, store, list(SAME.values()), cwd=cwd, read_only=True, forbid=True, HOME=str(cwd),
        XDG_CACHE_HOME=str(cwd), TORCHINDUCTOR_CACHE_DIR=str(cwd / "inductor"), TMPDIR=str(cwd), **PLACES,
    )  # fmt: skip
    for name, start in zip(SAME, again.starts, strict=True):
        assert start.is_hit, f"{name}: {start.reasons}"
        assert start.key == first[1].starts[0].key, name
        assert start.difference < 1e-5, name


def changed_by_variable(name: str, folder: Path, store: Path) -> None:
    start = run_starts(folder, store, [{}], read_only=True, **{name: VARIABLES[name]}).starts[0]
    assert not start.is_hit, f"{name} is not keyed"
    assert name in start.reasons or "arch" in start.reasons
    assert start.difference < 1e-5


def changed_by_edit(name: str, store: Path, place: Path) -> None:
    start = run_starts(write_package(place, EDITS[name]), store, [{}], read_only=True).starts[0]
    assert not start.is_hit, f"{name} is not keyed"
    assert "changed" in start.reasons or "declared otherwise" in start.reasons
    assert start.difference < 1e-5


def test_one_variable_and_one_edit(first: tuple[Path, Process], folder: Path, tmp_path: Path) -> None:
    """The others are among the slow tests; the seed is fixed so that a failure comes again."""
    chance = random.Random(7)
    changed_by_variable(chance.choice(sorted(VARIABLES)), folder, first[0])
    changed_by_edit(chance.choice(sorted(EDITS)), first[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_each_variable_is_keyed(name: str, first: tuple[Path, Process], folder: Path) -> None:
    changed_by_variable(name, folder, first[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EDITS))
def test_each_edit_is_seen(name: str, first: tuple[Path, Process], tmp_path: Path) -> None:
    changed_by_edit(name, first[0], tmp_path)
