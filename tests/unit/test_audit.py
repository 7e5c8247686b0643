"""Conditions on sizes: evaluated at many sizes at once or by intervals, proven within bounds, or cut at."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from piecework.errors import GuardError, TraceError
from piecework.stages.audit import EVERY_PAIR, EVERY_SIZE, INTERVALS, SAMPLE, prove, trace_sides
from piecework.values.graph import ShapeGuard, TracedGraph
from piecework.values.predicate import NUMBERS, UnknownExpression, evaluate, holds_by_intervals, names_in
from piecework.values.shapes import Range

WIDE = {"n": Range(1, 8192), "m": Range(1, 8192)}


def traced(guards: list[str], sizes: dict[str, int]) -> TracedGraph:
    found = tuple(ShapeGuard(guard, "model.py:7") for guard in guards)
    return TracedGraph(fx.Graph(), {}, (), (), (), {}, shape_guards=found, sizes=sizes)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("n >= 1", EVERY_SIZE), ("(n + 7) // 8 * 8 >= n and n != 0", EVERY_SIZE), ("max(n, 5) % 1 == 0", EVERY_SIZE),
        ("not (n > 8192)", EVERY_SIZE), ("math.ceil(n / 2) <= n", EVERY_SIZE), ("n + m >= 2", INTERVALS),
        ("n * m <= 8192 * 8192 or n == 3", INTERVALS), ("n % (m + 1) <= m", SAMPLE),
    ],
)  # fmt: skip
def test_what_holds_is_proven_by_the_method_that_reaches(text: str, method: str) -> None:
    assert prove(ShapeGuard(text, ""), WIDE, {"n": 13, "m": 11}).method == method


def test_two_short_names_are_tried_at_every_pair() -> None:
    bounds = {"n": Range(1, 64), "m": Range(1, 64)}
    proof = prove(ShapeGuard("n % (m + 1) <= m", ""), bounds, {"n": 13, "m": 11})
    assert (proof.method, proof.checked) == (EVERY_PAIR, 64 * 64)
    with pytest.raises(GuardError, match="it does not hold at n=1, m=2"):
        prove(ShapeGuard("n >= m", "model.py:7"), bounds, {"n": 13, "m": 11})


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("n > 16", Range(17, 8192)), ("n <= 16", Range(1, 16)), ("16 < n and n <= 99", Range(17, 99)),
        ("n == 13", Range(13, 13)),
    ],
)  # fmt: skip
def test_what_holds_on_a_stretch_keeps_the_traced_one(text: str, kept: Range) -> None:
    size = kept.low if kept.low > 13 else 13
    assert prove(ShapeGuard(text, ""), WIDE, {"n": size}).kept == {"n": kept}


def test_what_changes_too_often_is_refused() -> None:
    with pytest.raises(GuardError, match=r"only where `n % 8 != 0` \(at model.py:7\).*changes 2047 times"):
        prove(ShapeGuard("n % 8 != 0", "model.py:7"), WIDE, {"n": 13})


def test_what_is_not_understood_is_refused() -> None:
    with pytest.raises(GuardError, match="`bit_length\\(n\\)` is not understood"):
        prove(ShapeGuard("bit_length(n) > 2", ""), WIDE, {"n": 13})


def test_sides_cover_every_size_once_and_the_widest_comes_first() -> None:
    def trace(bounds: dict[str, Range]) -> TracedGraph:
        size = max(2, bounds["n"].low)
        side = next(
            g for g, fits in (("n <= 8", size <= 8), ("n > 8 and n <= 64", size <= 64), ("n > 64", True)) if fits
        )
        return traced([side, "n != 1"], {"n": size}) if bounds["n"] != Range(1, 1) else traced([], {"n": 1})

    sides = trace_sides(trace, {"n": Range(1, 8192)}, may_split=True)  # type: ignore[arg-type]
    assert [side.bounds["n"] for side in sides] == [Range(65, 8192), Range(9, 64), Range(2, 8), Range(1, 1)]
    first = sides[0].proofs[0]
    assert (first.expression, first.method, first.checked, first.line) == ("n > 64", EVERY_SIZE, 8128, "model.py:7")


def test_two_names_are_cut_into_boxes() -> None:
    def trace(bounds: dict[str, Range]) -> TracedGraph:
        sizes = {name: bound.high for name, bound in bounds.items()}
        guards = [f"{name} {'>' if size > 16 else '<='} 16" for name, size in sizes.items()]
        return traced(guards, sizes)

    sides = trace_sides(trace, {"n": Range(1, 64), "m": Range(1, 64)}, may_split=True)  # type: ignore[arg-type]
    served = [
        (n, m)
        for bounds in (side.bounds for side in sides)
        for n in range(bounds["n"].low, bounds["n"].high + 1)
        for m in range(bounds["m"].low, bounds["m"].high + 1)
    ]
    assert len(served) == len(set(served)) == 64 * 64


def test_too_many_sides_and_a_failing_one_are_errors() -> None:
    with pytest.raises(GuardError, match="more than 8 traces would be needed"):
        trace_sides(lambda b: traced([f"n == {b['n'].low}"], {"n": b["n"].low}), {"n": Range(1, 64)}, may_split=True)

    def fails(bounds: dict[str, Range]) -> TracedGraph:
        if bounds["n"].low > 32:
            raise TraceError("forward fails at model.py:9: index out of range")
        return traced(["n <= 32"], {"n": 13})

    with pytest.raises(GuardError, match="does not trace at sizes `n 33-64`: forward fails at model.py:9") as raised:
        trace_sides(fails, {"n": Range(1, 64)}, may_split=True)  # type: ignore[arg-type]
    assert "give `n` the largest size 32" in raised.value.hint


def expressions() -> st.SearchStrategy[str]:
    leaf = st.sampled_from(["n", "m", "1", "2", "7", "16"])
    number = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(lambda a, o, b: f"({a} {o} {b})", inner, st.sampled_from("+-*"), inner),
            st.builds(lambda a, o, b: f"({a} {o} {b})", inner, st.sampled_from(["//", "%"]), st.sampled_from("2378")),
            st.builds(lambda f, a, b: f"{f}({a}, {b})", st.sampled_from(["min", "max"]), inner, inner),
        ),
        max_leaves=6,
    )
    compare = st.builds(lambda a, o, b: f"{a} {o} {b}", number, st.sampled_from(["<", "<=", "==", "!=", ">"]), number)
    return st.one_of(
        compare, st.builds(lambda a, o, b: f"({a}) {o} ({b})", compare, st.sampled_from(["and", "or"]), compare)
    )


@given(expressions(), st.integers(1, 40), st.integers(1, 40))
def test_intervals_prove_nothing_false_and_all_ways_agree_with_python(text: str, n: int, m: int) -> None:
    expected = bool(eval(text))
    assert bool(evaluate(text, {"n": n, "m": m}, NUMBERS)) == expected
    if holds_by_intervals(text, {"n": (1, 40), "m": (1, 40)}):
        assert expected
    guard = ShapeGuard(text, "")
    try:
        proof = prove(guard, {"n": Range(n, n), "m": Range(m, m)}, {"n": n, "m": m})
    except GuardError:
        assert not expected
    else:
        assert expected and not proof.kept


def test_names_and_unknown_words() -> None:
    assert names_in("math.floor(n / 2) + max(m, n) > 3") == ("n", "m")
    with pytest.raises(UnknownExpression):
        evaluate("n.real", {"n": 3}, NUMBERS)
    assert torch.equal(evaluate("n % 3", {"n": torch.arange(4)}, NUMBERS), torch.tensor([0, 1, 2, 0]))
