"""The aot_eager compiler: a piece is traced to functional ATen operators, and runs as the text of that trace.

It shows what the compiler is given without what the compiler does: a piece that is wrong under `inductor` and right
here was compiled wrongly; one that is wrong here was traced wrongly.
"""

from __future__ import annotations

from typing import Any

import torch

from piecework.seam.functional import functional_text
from piecework.seam.guards import assumed_guards
from piecework.seam.rebuild import rebuild_piece
from piecework.values.artifact import TEXT, Artifact
from piecework.values.rewriting import PieceRewrite
from piecework.values.shapes import Box


class AotEagerCompiler:
    """Trace a piece by AOTAutograd, and let the functional graph run as text."""

    name = "aot_eager"

    def __init__(self, rewrite: PieceRewrite | None = None) -> None:
        self._rewrite = rewrite

    def with_passes(self, rewrite: PieceRewrite) -> AotEagerCompiler:
        """Return a compiler that runs passes over each functional piece."""
        return AotEagerCompiler(rewrite)

    @property
    def version(self) -> str:
        """What beside piece and range decides the artifact."""
        passes = f" passes={self._rewrite.digest}" if self._rewrite is not None else ""
        return f"format=1 torch={torch.__version__}{passes}"

    def compile(self, text: str, box: Box) -> Artifact:
        """Trace one piece for one box; the artifact is the text of its functional graph."""
        piece = rebuild_piece(text, box)
        functional, steps = functional_text(piece, box, self._rewrite)
        facts: dict[str, Any] = {"weights": list(piece.weight_names)}
        if steps:
            facts["passes"] = [step.report.as_dict() for step in steps]
        return Artifact(TEXT, functional, {}, assumed_guards(piece, box), facts)
