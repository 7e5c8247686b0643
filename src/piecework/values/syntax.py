"""Read Python text: the one place that does, since reading it in several threads can fail for no fault of the text."""

from __future__ import annotations

import ast
from typing import Literal, overload

_ATTEMPTS = 20


@overload
def parse_python(text: str) -> ast.Module: ...
@overload
def parse_python(text: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_python(text: str, mode: str = "exec") -> ast.AST:
    """Parse Python text; SyntaxError where it is none.

    Before 3.11.8 and 3.12.2 the interpreter counts the depth of a tree in the making once for the whole process. A
    collection of garbage in between lets another thread parse as well, and the first one's count is off: a SystemError
    that says nothing of the text (python/cpython#106905). Reading it again gives the tree.
    """
    for _ in range(_ATTEMPTS):
        try:
            return ast.parse(text, mode=mode)
        except SystemError as error:
            failed = error
    raise failed
