"""Where in the user's code a node of a graph comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import fx

_NOTED = re.compile(r"# \S*?([^/\s]+:\d+) in ")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def line_of(node: fx.Node) -> tuple[str, int]:
    """Return the file and the line that made a node, the innermost that is not torch's; empty where none is known."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
    own = [frame for frame in frames if "/site-packages/torch/" not in frame[0]] or frames
    return (own[-1][0], int(own[-1][1])) if own else ("", 0)


def line_of_first(nodes: Iterable[fx.Node]) -> tuple[str, int]:
    """Return the line of the first node that has one."""
    return next((line for node in nodes if (line := line_of(node))[0]), ("", 0))


def at(line: tuple[str, int]) -> str:
    """Write a line as it stands in a message: ` at path:number`, or nothing."""
    return f" at {line[0]}:{line[1]}" if line[0] else ""


def line_that_fixed(size: object) -> str:
    """Return ` at file:number` of the line that made a size one number, where torch noted it; it cuts folders short."""
    node = getattr(size, "node", None)
    noted = getattr(getattr(node, "shape_env", None), "replacements_slocs", {})
    place = getattr(noted.get(getattr(node, "_expr", None)), "maybe_user_loc", None)
    found = _NOTED.search(str(place or ""))
    return f" at {found[1]}" if found else ""
