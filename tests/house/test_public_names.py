"""What `import piecework` gives is a promise: a name that comes or goes changes a file that is read in review."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from house.source_tree import GOLDEN, PACKAGE

if not (PACKAGE / "__init__.py").is_file():
    pytest.skip("piecework/__init__.py is not written yet", allow_module_level=True)

import piecework

FROM_THE_START = {"compile", "load", "compilable", "split_op", "CompileOptions", "DiskStore", "MemoryStore", "errors"}


def test_public_names(compare_golden: Callable[[Path, str], None]) -> None:
    compare_golden(GOLDEN / "public_names.txt", "\n".join(sorted(piecework.__all__)))


def test_names_that_scripts_rely_on_stand() -> None:
    assert FROM_THE_START - set(piecework.__all__) == set()


@pytest.mark.parametrize("name", sorted(piecework.__all__))
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(piecework, name)
    assert value is getattr(piecework, name)
    assert name in dir(piecework)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = piecework.no_such_name


def test_type_checkers_are_told(tmp_path: Path) -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert importlib.util.find_spec("piecework") is not None
