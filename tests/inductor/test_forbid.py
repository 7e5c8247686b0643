"""Compiles are seen and forbidden, wherever they come from, without importing the compiler for it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo

from piecework.compilers.inductor import InductorCompiler
from piecework.errors import CompileForbidden
from piecework.seam.forbid import count_compilation, forbid_compilation
from piecework.values.shapes import Range
from toy_pieces import LAST, write_piece


def fresh_function() -> torch.nn.Module:
    """Make a module that is not compiled yet: Dynamo knows code, not modules."""
    torch._dynamo.reset()
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())


def test_dynamo_is_forbidden_and_comes_back() -> None:
    compiled = torch.compile(fresh_function(), backend="eager")
    with forbid_compilation(), pytest.raises(CompileForbidden, match="`Dynamo` was about to compile"):
        compiled(torch.ones(2, 3))
    assert compiled(torch.ones(2, 3)).shape == (2, 3)


def test_what_is_compiled_already_still_runs() -> None:
    compiled = torch.compile(fresh_function(), backend="eager", dynamic=False)
    compiled(torch.ones(2, 3))
    with forbid_compilation():
        assert compiled(torch.ones(2, 3)).shape == (2, 3)
        with pytest.raises(CompileForbidden):
            compiled(torch.ones(5, 3))


def test_every_thread_is_held_to_it() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            torch.compile(fresh_function(), backend="eager")(torch.ones(2, 3))
        except CompileForbidden as error:
            caught.append(error)

    with forbid_compilation():
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
    assert [error.facts["thread"] for error in caught if isinstance(error, CompileForbidden)] == ["worker"]


def test_our_own_compiler_says_so_too() -> None:
    with forbid_compilation(), pytest.raises(CompileForbidden, match="`AOTAutograd` was about to compile"):
        InductorCompiler(threads=1).compile(LAST, {"s0": Range(2, 4)})


def test_a_compiler_that_runs_as_a_process_is_seen() -> None:
    with forbid_compilation():
        for command in (["g++", "--version"], ["/usr/bin/x86_64-linux-gnu-gcc-12", "-c"], ["clang++-17"]):
            with pytest.raises(CompileForbidden, match="was about to compile"):
                subprocess.run(command, capture_output=True, check=False)
        assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0


def test_blocks_nest() -> None:
    with forbid_compilation():
        with forbid_compilation():
            pass
        with pytest.raises(CompileForbidden):
            torch.compile(fresh_function(), backend="eager")(torch.ones(2, 3))


def test_compiles_are_counted_by_kind() -> None:
    text = write_piece({"x0": "float32[7, 3] cpu"}, "v0 = torch.sin(x0)", "return (v0,)")
    with count_compilation() as counts:
        InductorCompiler(threads=1).compile(text, {})
    assert (counts["AOTAutograd"], counts["Inductor"], counts["Dynamo"]) == (1, 1, 0)
    assert counts["g++"] + counts["c++"] + counts["clang++"] >= 1
    with count_compilation() as nothing:
        torch.sin(torch.ones(3))
    assert not nothing


def test_nothing_is_imported_to_watch() -> None:
    script = """
import sys
from piecework.seam.forbid import forbid_compilation
from piecework.errors import CompileForbidden
assert "torch" not in sys.modules
with forbid_compilation():
    import torch
    assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
    try:
        torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    except CompileForbidden as error:
        print(error.facts["kind"])
from importlib import resources
import torch._dynamo.convert_frame as module
print(module.__spec__.name, module.__file__.endswith("convert_frame.py"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Dynamo", "torch._dynamo.convert_frame", "True"]
