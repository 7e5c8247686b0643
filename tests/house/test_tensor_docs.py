"""Every public function that takes or gives tensors says their shapes, in letters that docs/dims.md lists."""

from __future__ import annotations

import ast
import re

import pytest

from house.source_tree import Function, parse, public_functions_of, python_files, short
from house.tensor_blocks import faults_of, known_letters, parse_entry

FOLDERS = ("src/piecework/ops", "src/piecework/runtime", "src/piecework/engine")
SUFFIXED = re.compile(r"^[a-z][a-z0-9]*(?:_[a-z0-9]+)*_([A-Z][A-Z0-9]*)$")

GOOD = '''
def attend(query: Tensor, key: Tensor, slots: Tensor, cache: Tensor | None, scaling: float) -> Tensor:
    """Attend.

    Tensors:
        query       [T, H, D]        model  padded rows give undefined rows
        key         [T, K, D]        model  one row a token,
                                            in order
        slots       [T]              i32    -1 marks padding
        cache       [2, P, S, K, D]  model  MUTATED in place
        ->          [T, H*D], []     model  valid until the next step

    Raises nothing.
    """
'''


def function(text: str) -> Function:
    """Parse the one function of a text."""
    node = ast.parse(text).body[0]
    assert isinstance(node, Function)
    return node


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("query       [T", "query       [T", ""),
        ("Tensors:", "Values:", "has no `Tensors:` block"),
        ("[T, H*D]", "[T, H*X]", "uses `X`, which docs/dims.md does not list"),
        ("        ->          [T, H*D], []     model  valid until the next step\n", "", "does not tell what comes out"),
        ("slots       [T]", "slot        [T]", "does not tell of `slots`"),
        ("[T]              i32", "[T]              int", "has the dtype `int`"),
        ("slots       [T]  ", "slots       of T ", "is not `names [shape] dtype …`"),
        ("[T, K, D]", "[T, K?, D]", "`K?` in"),
    ],
)
def test_a_block_is_read(old: str, new: str, fault: str) -> None:
    faults = faults_of(function(GOOD.replace(old, new)), known_letters())
    assert any(fault in found for found in faults) if fault else faults == []


def test_an_entry_is_taken_apart() -> None:
    entry = parse_entry("key, value  [B+1, ...]  bf16  a pair")
    assert entry is not None
    assert (entry.names, entry.dims, entry.dtype) == (("key", "value"), ("B", "+", "1", "..."), "bf16")


def test_every_public_function_tells_of_its_tensors() -> None:
    letters = known_letters()
    faults = [
        f"{short(path)}:{node.lineno} {name} {fault}"
        for path in python_files(*FOLDERS)
        for name, node, class_docstring in public_functions_of(path)
        for fault in faults_of(node, letters, class_docstring)
    ]
    assert faults == []


def test_shape_suffixes_use_the_same_letters() -> None:
    letters = known_letters()
    strange = set()
    for path in python_files("src"):
        for node in ast.walk(parse(path)):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
            if (found := SUFFIXED.match(name)) and set(re.sub(r"\d", "", found[1])) - letters:
                strange.add(f"{short(path)}:{node.lineno} {name}")  # type: ignore[attr-defined]
    assert strange == set()
