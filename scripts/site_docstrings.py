"""Show `Tensors:` blocks of docstrings on the site as they are written: columns, one line an argument."""

from __future__ import annotations

import re
from typing import Any

import griffe

BLOCK = re.compile(r"^Tensors:\n(?=    )", re.MULTILINE)


class TensorBlocks(griffe.Extension):
    """Make each block a heading and code, which Markdown leaves as it is."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = BLOCK.sub("**Tensors**\n\n", obj.docstring.value)
