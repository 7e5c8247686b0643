"""Key: named factors, hashed whole. `docs/keys.md` lists each, and what keys do not cover; torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecework.values.digest import digest_data, digest_text

FORMAT = "1"


def artifact_factors(
    piece: str,
    box: str,
    compiler: Mapping[str, str],
    toolchain: Mapping[str, str],
    environment: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Return the factors of one piece compiled for one box."""
    return {
        "format": FORMAT,
        "environment": {name: dict(values) for name, values in (environment or {}).items()},
        "piece": digest_text(piece),
        "range": box,
        "compiler": dict(compiler),
        "toolchain": dict(toolchain),
    }


def program_factors(
    model: Mapping[str, Any],
    pattern: Any,
    options: Mapping[str, Any],
    compiler: Mapping[str, str],
    toolchain: Mapping[str, str],
    passes: Sequence[Mapping[str, Any]] = (),
    operators: Mapping[str, str] | None = None,
    environment: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Return the factors by which a program record is looked up, under four heads."""
    return {
        "format": FORMAT,
        "environment": {name: dict(values) for name, values in (environment or {}).items()},
        "config": {"model": dict(model), "inputs": pattern, "options": dict(options)},
        "code": {"passes": [dict(one) for one in passes], "operators": dict(operators or {})},
        "compiler": {**compiler, **toolchain},
    }


def factors_of_side(factors: Mapping[str, Any], bounds: str, siblings: Sequence[str]) -> Mapping[str, Any]:
    """Name a side (`bounds`; "" is no side) apart from its program: only the one that names others is looked up."""
    return factors if siblings or not bounds else {**factors, "config": {**factors["config"], "side": bounds}}


def key_of(factors: Mapping[str, Any]) -> str:
    """Hash factors whole."""
    return digest_data(factors)


def program_key(factors: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return the key of a program: what a start looks it up by, and the digest of all that its record says."""
    return f"{key_of(factors)}.{digest_data(record)}"


def differing(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of the factors in which two sets differ, with both values."""
    found = []
    for name in sorted({*one, *other}):
        left, right = one.get(name), other.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found.extend(differing(left, right, f"{prefix}{name}."))
        elif left != right:
            found.append(f"{prefix}{name}: `{_short(left)}` / `{_short(right)}`")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
