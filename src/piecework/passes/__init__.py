"""Passes: functions graph -> graph. The table of those that come with Piecework, and the list that options ask for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable

from piecework.errors import OptionError
from piecework.passes.apply import PieceRewriting, apply_passes, diff_of
from piecework.passes.declare import graph_pass
from piecework.values.rewriting import GraphPass

__all__ = ["BUILT_IN", "PieceRewriting", "apply_passes", "diff_of", "graph_pass", "resolve_passes"]

# Each pass by its name: the module in which the function of that name is declared one.
BUILT_IN: dict[str, str] = {
    "merge_linears": "piecework.passes.merge_linears",
    "merge_linears_everywhere": "piecework.passes.merge_linears",
    "no_ops": "piecework.passes.no_ops",
    "sequence_parallel": "piecework.passes.sequence_parallel",
}


def resolve_passes(given: Iterable[str | GraphPass]) -> tuple[GraphPass, ...]:
    """Return the passes of a list of names and passes, in its order."""
    found = tuple(one if isinstance(one, GraphPass) else _built_in(one) for one in given)
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise OptionError(f"pass `{twice}` is given twice", hint="each pass runs once, in the order of `passes`")
    return found


def _built_in(name: str) -> GraphPass:
    if name not in BUILT_IN:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        meant = f"did you mean `{near[0]}`? " if near else ""
        raise OptionError(
            f"pass `{name}` is unknown",
            hint=f"{meant}known are {', '.join(BUILT_IN)}; one of your own is given as what `graph_pass` made of it",
        )
    found: GraphPass = getattr(importlib.import_module(BUILT_IN[name]), name)
    return found
