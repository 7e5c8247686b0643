"""What a compile assumed of the sizes, as expressions over the piece's own symbols."""

from __future__ import annotations

from typing import Any

from piecework.seam.rebuild import RebuiltPiece
from piecework.values.shapes import Box


def assumed_guards(piece: RebuiltPiece, box: Box) -> tuple[str, ...]:
    """Return what the compile assumes beyond the box: Python expressions such as `s0 <= 4096`, sorted.

    They stand in the piece's shape environment once the compiler has run: as guards, as narrowed ranges and as symbols
    that were replaced. What the box proves already is left out.
    """
    import sympy

    from piecework.seam.symbols import python_text

    environment = piece.shape_env
    names = {symbol: sympy.Symbol(name, integer=True) for symbol, name in _symbols(piece).items()}
    ranges = {symbol: _range_of(names[symbol].name, box) for symbol in names}
    found: set[str] = set()

    def write(expression: Any) -> str:
        return python_text(expression.xreplace(names))

    for guard in environment.guards:
        expression = guard.expr
        if not expression.free_symbols <= names.keys():  # a symbol of torch's own may stand for a number by now
            expression = environment.replace(expression)
        if not _is_proven(expression, ranges):
            found.add(write(expression))
    for symbol, name in names.items():
        if (value := environment.replacements.get(symbol)) is not None and value != symbol:
            found.add(f"{name.name} == {write(value)}")
        elif symbol in environment.var_to_range and symbol in ranges and ranges[symbol] is not None:
            found.update(_narrowed(name.name, environment.var_to_range[symbol], ranges[symbol]))
    return tuple(sorted(found))


def _symbols(piece: RebuiltPiece) -> dict[Any, str]:
    by_text = {str(s): s for s in (*piece.shape_env.var_to_range, *piece.shape_env.replacements)}
    return {by_text[text]: name for text, name in piece.symbols.items() if text in by_text}


def _range_of(name: str, box: Box) -> Any:
    from torch.utils._sympy.value_ranges import ValueRanges

    return ValueRanges(box[name].low, box[name].high) if name in box else None


def _is_proven(expression: Any, ranges: dict[Any, Any]) -> bool:
    """Tell whether an expression holds for all sizes of the box."""
    import sympy
    from torch.utils._sympy.value_ranges import bound_sympy

    if expression == sympy.true:
        return True
    known = {symbol: bounds for symbol, bounds in ranges.items() if bounds is not None}
    bounds = bound_sympy(expression, known)
    return bool(bounds.is_singleton() and bounds.lower == sympy.true)


def _narrowed(name: str, now: Any, box: Any) -> set[str]:
    found = set()
    if now.lower > box.lower:
        found.add(f"{name} >= {int(now.lower)}")
    if now.upper < box.upper:
        found.add(f"{name} <= {int(now.upper)}")
    return found
