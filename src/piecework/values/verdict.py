"""What came of running an artifact beside its piece's text, before anybody is served by it; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from piecework.values.artifact import Artifact
from piecework.values.shapes import Box

HELD, FAILED, UNTRIED = "held", "failed", "untried"


@dataclass(frozen=True)
class Verdict:
    """`held`, `failed` or `untried`, the reason of the last two, and what the artifact's record keeps of it."""

    outcome: str
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


# Takes a piece's number and text, the box that is to be served, and the artifact, whose kernels are in the store.
Check = Callable[[int, str, Box, Artifact], Verdict]


def let_pass(number: int, text: str, box: Box, artifact: Artifact) -> Verdict:
    """Try nothing."""
    return Verdict(UNTRIED)
