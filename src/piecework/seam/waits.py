"""Collectives that a cut parts from their wait: what they give may not be read before it, nor kept across a cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from piecework.seam.collectives import WAIT
from piecework.seam.kinds import is_view, operator_name

SPACES = ("_c10d_functional", "_c10d_functional_autograd")


def is_collective(node: fx.Node) -> bool:
    """Tell whether a node starts a collective whose result must be waited for."""
    name = operator_name(node).partition(".")[0]
    return name.partition("::")[0] in SPACES and name != WAIT


def parted(place: Mapping[fx.Node, int]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each collective, and each use of its unwaited result that lies in another region; `place` numbers those."""
    for node in place:
        if is_collective(node):
            for user in _uses(node):
                if place.get(user, place[node]) != place[node]:
                    yield node, user


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what uses a result that was not waited for, also by a view or as an item of a list."""
    for user in node.users:
        yield user
        if is_view(user):
            yield from _uses(user)
