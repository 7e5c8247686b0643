"""Who may import whom, and what an import costs: read from the source, and seen in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from house.source_tree import PACKAGE, ROOT, parse

TORCH_FREE = (
    "errors", "options", "events", "env", "values.shapes", "values.digest", "values.signature", "values.artifact",
    "store", "store.disk", "store.memory", "store.layout", "engine.sequence", "engine.pages", "engine.scheduler",
    "cli.main",
)  # fmt: skip
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "triton")


def loaded_by(statement: str) -> set[str]:
    """List the modules that a fresh process holds after one statement."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_load_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import piecework.{module}")


def test_the_package_itself_loads_nothing() -> None:
    """Public names are resolved when first used: importing the package brings in no part of it."""
    loaded = loaded_by("import piecework")
    assert {name for name in loaded if name.startswith("piecework.")} == set()
    assert "torch" not in loaded


@pytest.mark.parametrize("module", ["runtime.program", "stages.bind", "seam.loader", "ops"])
def test_what_a_warm_start_uses_loads_no_compiler(module: str) -> None:
    loaded = loaded_by(f"import piecework.{module}")
    assert {name for name in COMPILER if name in loaded} == set()
    assert "transformers" not in loaded


def test_the_hot_path_imports_only_what_runs() -> None:
    heavy = {"json", "logging", "pickle", "piecework.store", "piecework.compilers"}
    found = set()
    for path in (PACKAGE / "runtime").glob("*.py"):
        for node in ast.walk(parse(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {f"{path.name}: {name}" for name in names for bad in heavy if (name + ".").startswith(bad + ".")}
    assert found == set()


def test_layers_hold() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/check_layers.py"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_layer_contract_names_every_part_of_the_package() -> None:
    """A new folder or module at the top has to be given its layer; `exhaustive` in the contract says the same."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["id"] == "layers")["layers"]
    named = {name.strip("() ") for layer in layers for name in layer.split("|")}
    parts = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert parts - {"__init__"} <= named


def test_a_broken_layer_is_seen(tmp_path: Path) -> None:
    """The contract bites: a copy of the package in which `errors` imports `cli` fails the check."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/check_layers.py").write_text((ROOT / "scripts/check_layers.py").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    package = tmp_path / "src/piecework"
    for name in ("cli", "store", "runtime"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "errors.py").write_text("from piecework import cli\n")
    (package / "runtime/__init__.py").write_text("import json\n")
    (package / "store/__init__.py").write_text("import torch\n")
    done = subprocess.run(
        [sys.executable, "scripts/check_layers.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    broken = {line.removesuffix(" BROKEN") for line in done.stdout.splitlines() if line.endswith(" BROKEN")}
    assert done.returncode != 0
    assert broken == {
        "Layers, top down",
        "The hot path stays small",
        "What answers in a third of a second imports no torch",
    }
