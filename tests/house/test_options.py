"""Every option says whether it is part of the key, holds nothing that can change, and is written down."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest

from house.source_tree import ROOT

if importlib.util.find_spec("piecework") is None or importlib.util.find_spec("piecework.options") is None:
    pytest.skip("piecework.options is not written yet", allow_module_level=True)

from piecework import options


def option_models() -> list[type]:
    """List the dataclasses that the module of options defines."""
    return [
        value
        for value in vars(options).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == options.__name__
    ]


def test_there_are_options() -> None:
    assert "CompileOptions" in {model.__name__ for model in option_models()}


@pytest.mark.parametrize("model", option_models(), ids=lambda model: model.__name__)
def test_every_field_says_whether_it_is_keyed(model: type) -> None:
    silent = {
        field.name: dict(field.metadata)
        for field in dataclasses.fields(model)
        if not isinstance(field.metadata.get("keyed"), bool)
    }
    assert silent == {}


@pytest.mark.parametrize("model", option_models(), ids=lambda model: model.__name__)
def test_options_are_frozen_and_hashable(model: type) -> None:
    assert model.__dataclass_params__.frozen  # type: ignore[attr-defined]
    changeable = re.compile(r"\b(list|dict|set)\b")
    assert {field.name for field in dataclasses.fields(model) if changeable.search(str(field.type))} == set()


@pytest.mark.parametrize("model", option_models(), ids=lambda model: model.__name__)
def test_every_option_is_written_down(model: type) -> None:
    page = ROOT / "docs/options.md"
    if not page.is_file():
        pytest.skip("docs/options.md is not written yet")
    text = page.read_text()
    assert {field.name for field in dataclasses.fields(model) if f"`{field.name}`" not in text} == set()
