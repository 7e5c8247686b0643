"""The eager compiler: a piece runs as its own text, so what it gives is what the model gives."""

from __future__ import annotations

import torch

from piecework.values.artifact import TEXT, Artifact
from piecework.values.shapes import Box


class EagerCompiler:
    """Compile nothing: the artifact is the piece's text."""

    name = "eager"

    @property
    def version(self) -> str:
        return f"format=1 torch={torch.__version__}"

    def compile(self, text: str, box: Box) -> Artifact:
        """Return the text as an artifact; it serves every box."""
        return Artifact(TEXT, text)
