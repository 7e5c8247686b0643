"""docs/keys.md lists every factor that a key holds, and no table of it lists one that none holds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from house.source_tree import ROOT
from piecework.seam.surroundings import surroundings
from piecework.seam.toolchain import toolchain
from piecework.values.key import artifact_factors, differing, key_of, program_factors

COMPILER = {"name": "eager", "version": "1"}
GPU_ONLY = {"cuda", "triton"}


def factor_names() -> set[str]:
    """List the names of all factors, the inner ones of config, code and compiler too."""
    tools = toolchain("cpu")
    artifact = artifact_factors("piece", "1..2", COMPILER, tools)
    program = program_factors({}, [], {}, COMPILER, tools)
    inner = {name for head in ("config", "code", "compiler") for name in program[head]}
    return {*artifact, *program, *tools, *COMPILER, *inner, *surroundings("cpu", {})}


def text_of_page() -> str:
    """Read the page up to where it says what keys do not cover."""
    return (ROOT / "docs/keys.md").read_text().split("## What keys do not cover")[0]


def test_every_factor_is_listed() -> None:
    text = text_of_page()
    assert {name for name in factor_names() if f"`{name}`" not in text} == set()


def test_no_listed_factor_is_gone() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", text_of_page(), re.MULTILINE))
    assert listed - GPU_ONLY - factor_names() == set()
    assert listed


@pytest.mark.parametrize("place", ["/", "\\\\", "hostname", "rank", "user", "pid"])
def test_the_toolchain_holds_no_place(place: str) -> None:
    assert [value for value in toolchain("cpu").values() if place in value] == []


@pytest.mark.parametrize("name", ["piece", "range", "compiler", "toolchain", "environment"])
def test_each_factor_moves_the_key(name: str) -> None:
    given: dict[str, Any] = {
        "piece": "p", "box": "1..2", "compiler": COMPILER, "toolchain": {"torch": "2"}, "environment": {"modes": {}}
    }  # fmt: skip
    other = {
        "piece": "q", "range": "1..3", "compiler": {"name": "eager", "version": "2"}, "toolchain": {"torch": "3"},
        "environment": {"modes": {"mkldnn": "False"}},
    }  # fmt: skip
    argument = "box" if name == "range" else name
    before = artifact_factors(**given)
    after = artifact_factors(**{**given, argument: other[name]})
    assert key_of(before) != key_of(after)
    assert [line.split(":")[0].split(".")[0] for line in differing(before, after)] == [name]
    assert key_of(before) == key_of(artifact_factors(**given))
