"""The passes that the choice of operators asks for: find, fuse, use.

A start that finds its program needs their names, versions and digests alone: what they do is imported when they run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from piecework.ops.choice import Choice
from piecework.ops.fused import FUSED_FORMS
from piecework.values.digest import digest_data
from piecework.values.graph import TracedGraph
from piecework.values.rewriting import GRAPH, GraphPass, Rewritten

VERSION = 2  # of all of them together: a change here misses every record made before

# Each finder: the module and function that find, and the operators that it finds.
FINDERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "find_norms": ("find_norms:find_rms_norm", ("rms_norm",)),
    "find_gates": ("find_gates:find_gate", ("silu_and_mul", "gelu_and_mul")),
    "find_rotary": ("find_rotary:find_rotary", ("rotary",)),
    "find_quants": ("find_quants:find_quant", ("quant_fp8",)),
}


def operator_passes(choices: Mapping[str, Choice]) -> tuple[GraphPass, ...]:
    """Return the passes of a choice, in order: what is on is found in a model that spells it out, fused, and used.

    What an operator that is on is made of is looked for too. The last pass always runs: a model may call our
    operators itself, and those that are off become what their references compute.
    """
    on = {name for name, choice in choices.items() if choice.is_on}
    wanted = on | {part for name in on for part in choices[name].operator.made_of}
    wanted |= {"rms_norm"} if "fused_add_rms_norm" in on else set()
    passes = [
        _pass(name, _finding(place, found))
        for name, (place, names) in FINDERS.items()
        if (found := frozenset(wanted.intersection(names)))
    ]
    if "fused_add_rms_norm" in on:  # it alone changes what is rounded, so that it is never fused on another's account
        passes.append(_pass("fuse_add_norm", _fusing("fuse_operators:fuse_add_norm")))
    forms = frozenset(pair for pair, form in FUSED_FORMS.items() if _is_on(form, choices))
    if forms:
        passes.append(_pass("fuse_quant", _fusing("fuse_operators:fuse_quant", forms)))
    for name in ("rotary_kv_update", "attention_quant_fp8"):
        if name in on:
            passes.append(_pass(f"fuse_{name}", _fusing(f"fuse_steps:fuse_{name}")))
    digest = digest_data({name: choice.as_factor() for name, choice in choices.items()})[:16]
    return (*passes, _pass("use_operators", _using(choices), digest))


def _is_on(form: str, choices: Mapping[str, Choice]) -> bool:
    return any(choice.is_on and any(each.name == form for each in choice.operator.forms) for choice in choices.values())


def _pass(name: str, function: Callable[[TracedGraph], Rewritten], digest: str = "") -> GraphPass:
    return GraphPass(name, VERSION, GRAPH, function, digest=digest, is_quiet=True)


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"piecework.passes.{module}"), name)


def _finding(place: str, wanted: frozenset[str]) -> Callable[[TracedGraph], Rewritten]:
    def run(traced: TracedGraph) -> Rewritten:
        matches, misses = _import("found:rewrite_found")(traced, [_import(place)], wanted)
        return Rewritten(traced, tuple(matches), tuple(misses))

    return run


def _fusing(place: str, *arguments: Any) -> Callable[[TracedGraph], Rewritten]:
    def run(traced: TracedGraph) -> Rewritten:
        matches, misses = _import(place)(traced, *arguments)
        return Rewritten(traced, tuple(matches), tuple(misses))

    return run


def _using(choices: Mapping[str, Choice]) -> Callable[[TracedGraph], Rewritten]:
    def run(traced: TracedGraph) -> Rewritten:
        found: Rewritten = _import("use_operators:use_operators")(traced, choices)
        return found

    return run
