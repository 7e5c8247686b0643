"""One word a notion: names that say nothing are not used."""

from __future__ import annotations

import ast
import re

from house.source_tree import ROOT, classes_of, functions_of, package_files, parse, python_files, short

EMPTY_CLASS_WORDS = {"Manager", "Handler", "Helper", "Helpers", "Wrapper", "Base", "Util", "Utils", "Info", "Data"}
EMPTY_MODULE_NAMES = {"utils", "util", "common", "core", "helpers", "helper", "misc", "base", "shared"}


def words_of(class_name: str) -> set[str]:
    """Split a class name into its words."""
    return set(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", class_name))


def test_words_are_told_apart() -> None:
    assert words_of("CacheManager") == {"Cache", "Manager"}
    assert words_of("KVDatabase") == {"KV", "Database"}


def test_no_class_carries_an_empty_word() -> None:
    found = {
        f"{short(path)}: {node.name}"
        for path in python_files()
        for node in classes_of(path)
        if words_of(node.name) & EMPTY_CLASS_WORDS
    }
    assert found == set()


def test_no_module_is_a_drawer_for_anything() -> None:
    found = {short(path) for path in python_files() if path.stem in EMPTY_MODULE_NAMES}
    folders = {short(path) for path in (ROOT / "src").rglob("*") if path.is_dir() and path.name in EMPTY_MODULE_NAMES}
    assert found | folders == set()


def test_every_public_module_says_what_it_is() -> None:
    silent = {short(path) for path in package_files() if parse(path).body and not ast.get_docstring(parse(path))}
    assert silent == set()


def test_no_todo_is_left_in_the_package() -> None:
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert {short(path) for path in package_files() if mark.search(path.read_text())} == set()


def test_functions_do_not_negate_in_their_flags() -> None:
    negative = re.compile(r"^(no|not|disable|without)_")
    found = {
        f"{short(path)}:{function.lineno} {argument.arg}"
        for path in package_files()
        for function in functions_of(path)
        for argument in [*function.args.args, *function.args.kwonlyargs]
        if negative.match(argument.arg)
    }
    assert found == set()
