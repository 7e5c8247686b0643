"""Run import-linter over the contracts of pyproject.toml that speak of modules written so far.

import-linter treats a missing module as a mistake in the contract. The contracts here were written with the design,
before all of the modules: this drops the names that have no file yet, so that the others are checked from the first.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent
OWN_PACKAGE = "piecework"
MODULE_FIELDS = ("source_modules", "forbidden_modules", "protected_modules", "allowed_importers", "modules")


def is_written(module: str, source_folder: Path) -> bool:
    """Tell whether a module named in a contract can be checked: external, a wildcard, or a file of ours."""
    if module.split(".")[0] != OWN_PACKAGE or "*" in module:
        return True
    path = source_folder.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def keep_written(contract: Mapping[str, object], source_folder: Path) -> tuple[dict[str, object] | None, list[str]]:
    """Drop from one contract the modules that have no file; None if nothing of it can be checked."""
    kept, absent = dict(contract), []
    for field in MODULE_FIELDS:
        names = contract.get(field)
        if not isinstance(names, list):
            continue
        kept[field] = [name for name in names if is_written(name, source_folder)]
        absent += [name for name in names if not is_written(name, source_folder)]
        if not kept[field]:
            return None, absent
    return kept, absent


def as_toml(value: object) -> str:
    """Write the few kinds of value that contracts are made of as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    raise TypeError(f"`{value!r}` of type `{type(value).__name__}` in a contract is not known here")


def render(top: Mapping[str, object], contracts: Sequence[Mapping[str, object]]) -> str:
    """Write import-linter's configuration as the text of a TOML file."""
    lines = ["[tool.importlinter]", *(f"{name} = {as_toml(value)}" for name, value in top.items())]
    for contract in contracts:
        lines += ["", "[[tool.importlinter.contracts]]", *(f"{key} = {as_toml(val)}" for key, val in contract.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Check the layers and print what was left out."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    top = {name: value for name, value in configured.items() if name != "contracts"}
    contracts, absent = [], set()
    for contract in configured["contracts"]:
        kept, missing = keep_written(contract, ROOT / "src")
        absent.update(missing)
        if kept is not None:
            contracts.append(kept)
    if absent:
        print("not written yet, so not checked:", ", ".join(sorted(absent)))
    sys.path.insert(0, str(ROOT / "src"))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "contracts.toml"
        config.write_text(render(top, contracts))
        return lint_imports(config_filename=str(config), no_cache=True)


if __name__ == "__main__":
    sys.exit(main())
