"""The aot_eager compiler: a piece is traced to functional ATen operators, and runs as the text of that trace.

It shows what the compiler is given without what the compiler does: a piece that is wrong under `inductor` and right
here was compiled wrongly; one that is wrong here was traced wrongly.
"""

from __future__ import annotations

import torch

from piecework.seam.functional import functional_text
from piecework.seam.guards import assumed_guards
from piecework.seam.rebuild import rebuild_piece
from piecework.values.artifact import TEXT, Artifact
from piecework.values.shapes import Box


class AotEagerCompiler:
    """Trace a piece by AOTAutograd, and let the functional graph run as text."""

    name = "aot_eager"

    @property
    def version(self) -> str:
        """What beside piece and range decides the artifact."""
        return f"format=1 torch={torch.__version__}"

    def compile(self, text: str, box: Box) -> Artifact:
        """Trace one piece for one box; the artifact is the text of its functional graph."""
        piece = rebuild_piece(text, box)
        functional = functional_text(piece, box)
        return Artifact(TEXT, functional, {}, assumed_guards(piece, box), {"weights": list(piece.weight_names)})
