"""Numbers compared by identity: Python's answer follows from which it keeps one object of, a trace's does not."""

from __future__ import annotations

import dis
import linecache
from collections.abc import Iterable
from types import CodeType

from piecework.errors import TraceError

_IS = dis.opmap["IS_OP"]


def refuse_identity(codes: Iterable[CodeType]) -> None:
    """Raise TraceError where traced code says `is` of a number: in a trace a size is a symbol, never that object."""
    for code in codes:
        if _IS not in code.co_code[::2]:
            continue
        instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
        for before, instruction in zip(instructions, instructions[1:], strict=False):
            if instruction.opcode == _IS and type(before.argval) in (int, float) and "LOAD" in before.opname:
                line = before.positions.lineno if before.positions else None
                where = f"{code.co_filename}:{line or code.co_firstlineno}"
                raise TraceError(
                    f"`{linecache.getline(code.co_filename, line or 0).strip()}` compares with the number "
                    f"`{before.argval}` by identity at {where}",
                    hint="write `==`: whether two equal numbers are one object is the interpreter's affair",
                    facts={"file": code.co_filename, "line": line},
                )
