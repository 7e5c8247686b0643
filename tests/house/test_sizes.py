"""Files and functions stay small enough to be read in one sitting."""

from __future__ import annotations

from house.source_tree import functions_of, python_files, short

FILE_LINES = 300
FUNCTION_LINES = 60
# The straight line is one function, so that the whole flow stands on one page.
LONGER_FUNCTIONS = {("src/piecework/pipeline.py", "compile_model"): 80}


def test_no_file_is_longer_than_a_sitting() -> None:
    lengths = {short(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_no_function_is_longer_than_a_page() -> None:
    too_long = {}
    for path in python_files():
        for function in functions_of(path):
            assert function.end_lineno is not None
            length = function.end_lineno - function.lineno + 1
            if length > LONGER_FUNCTIONS.get((short(path), function.name), FUNCTION_LINES):
                too_long[f"{short(path)}:{function.lineno} {function.name}"] = length
    assert too_long == {}
