"""Compilers that are wrong in a known way: what they make runs, and gives something else than the piece's text."""

from __future__ import annotations

from collections.abc import Callable

from piecework.values.artifact import TEXT, Artifact
from piecework.values.shapes import Box

Fault = Callable[[str], str]


class PlantedCompiler:
    """Give each piece's text, altered by `fault` where that finds something to alter; count what was compiled."""

    name = "planted"
    version = "1"

    def __init__(self, fault: Fault, guards: Callable[[str, Box], tuple[str, ...]] = lambda text, box: ()) -> None:
        self._fault = fault
        self._guards = guards
        self.boxes: list[Box] = []

    def compile(self, text: str, box: Box) -> Artifact:
        """Return the altered text as an artifact."""
        self.boxes.append(box)
        # One more line than the text has, so that it is never taken for the text itself.
        return Artifact(TEXT, self._fault(text) + "\n", {}, self._guards(text, box))


def split_result(text: str) -> tuple[list[str], list[str]]:
    """Return a text's lines before its return, and the names that it returns."""
    *lines, last = text.rstrip("\n").splitlines()
    return lines, [
        name.strip() for name in last.strip().removeprefix("return (").rstrip(")").split(",") if name.strip()
    ]


def with_result(text: str, position: int, *calls: str) -> str:
    """Compute one result by further calls: `{}` stands for what it was, `a0`, `a1`, … for what they give."""
    lines, names = split_result(text)
    lines += [f"    a{number} = {call.format(names[position])}" for number, call in enumerate(calls)]
    names[position] = f"a{len(calls) - 1}"
    return "\n".join([*lines, f"    return ({', '.join(names)},)"]) + "\n"


def off_by_one_percent(text: str, position: int = 0) -> str:
    """Make one result larger by 1 %."""
    return with_result(text, position, "torch.mul({}, 1.01)")


def with_other_strides(text: str, position: int = 0) -> str:
    """Lay one result of two dimensions out by columns; its values stay what they are."""
    return with_result(text, position, "{}.t()", "a0.contiguous()", "a1.t()")


def with_altered_call(text: str, line: int) -> str:
    """Make what the call on one line gives larger by 1 % for everything after it."""
    lines = text.splitlines()
    name, _, call = lines[line].strip().partition(" = ")
    lines[line] = f"    {name}_was = {call}\n    {name} = torch.mul({name}_was, 1.01)"
    return "\n".join(lines) + "\n"


def with_other_layout(text: str, line: int) -> str:
    """Lay what the call on one line gives out by columns for everything after it; its values stay what they are."""
    lines = text.splitlines()
    name, _, call = lines[line].strip().partition(" = ")
    steps = [
        f"{name}_was = {call}",
        f"{name}_t = {name}_was.t()",
        f"{name}_c = {name}_t.contiguous()",
        f"{name} = {name}_c.t()",
    ]
    lines[line] = "\n".join(f"    {step}" for step in steps)
    return "\n".join(lines) + "\n"


def calls_of(text: str) -> dict[int, str]:
    """Return the lines of a text that are calls, with the value that each makes."""
    return {i: line.strip().partition(" = ")[0] for i, line in enumerate(text.splitlines()) if " = " in line}
