"""Choose: which operators are on, and which implementation each call gets."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from piecework.errors import OptionError
from piecework.ops.operators import REFERENCE, Arguments, Body, Implementation, Operator, operators
from piecework.values.digest import digest_code, digest_data, digest_text

ALL, NONE = "all", "none"


@dataclass(frozen=True)
class Choice:
    """Whether an operator is on for a device, and what may implement it there, the first that serves a call."""

    operator: Operator
    is_on: bool
    candidates: tuple[Implementation, ...]

    def pick(self, form: str, arguments: Arguments) -> Implementation | None:
        """Return what implements a call; None leaves it to the reference."""
        return next((one for one in self.candidates if form in one.bodies and one.serves(arguments)), None)

    def as_factor(self) -> str:
        """Return what enters keys: the state, and each implementation at hand with a digest of its source."""
        named = [(one.name, digest_of(one)) for one in self.candidates]
        named.append((REFERENCE, _digest([form.reference for form in self.operator.forms])))
        return f"{'on' if self.is_on else 'off'}: {', '.join(f'{name} {digest}' for name, digest in named)}"


def choose(custom_ops: Sequence[str], device: str) -> dict[str, Choice]:
    """Return the choice for each operator of the registry, by name.

    `custom_ops` holds exactly one of `all` and `none`, and `+op` or `-op` on top. Where an operator is off, only
    implementations that no compiler can replace are candidates. An opaque one is on where it is named alone.
    """
    base, added, removed = _read(custom_ops)
    chosen = {}
    for operator in operators.values():
        name = operator.name
        is_on = name in added or (base == ALL and not operator.is_opaque and name not in removed)
        at_hand = [one for one in operator.implementations if one.is_at_hand(device)]
        candidates = at_hand if is_on else [one for one in at_hand if one.irreplaceable and name not in removed]
        chosen[name] = Choice(operator, is_on, tuple(candidates))
    return chosen


def _read(custom_ops: Sequence[str]) -> tuple[str, set[str], set[str]]:
    bases = [word for word in custom_ops if word in (ALL, NONE)]
    if len(bases) != 1:
        raise OptionError(
            f"`custom_ops` holds {len(bases)} of the base modes `all` and `none`",
            hint="exactly one of them says where operators start from; `+op` and `-op` change single ones",
        )
    added, removed = ({word[1:] for word in custom_ops if word[0] == sign} for sign in "+-")
    known = operators.names()
    for name in sorted(added | removed):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean `{near[0]}`? " if near else ""
            raise OptionError(f"operator `{name}` is unknown", hint=f"{meant}known are {', '.join(known)}")
    return bases[0], added, removed


def digest_of(implementation: Implementation) -> str:
    """Return a digest of an implementation's code, and of what it names as its further sources."""
    text = ""
    if implementation.source_module:
        found = importlib.util.find_spec(implementation.source_module)
        text = digest_text(Path(found.origin).read_text(encoding="utf-8")) if found and found.origin else ""
    return _digest([*implementation.bodies.values(), *implementation.sources], text)


def _digest(functions: Sequence[Body], text: str = "") -> str:
    codes = [digest_code(code) if (code := getattr(each, "__code__", None)) else repr(each) for each in functions]
    closures = [
        digest_code(cell.cell_contents.__code__)
        for each in functions
        for cell in getattr(each, "__closure__", None) or ()
        if hasattr(cell.cell_contents, "__code__")
    ]
    return digest_data([*codes, *closures, text])[:16]
