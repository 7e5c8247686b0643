"""JSON bodies: text that JSON can carry and UTF-8 cannot, a lone surrogate, goes out as `?`."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


class Json(JSONResponse):
    """A JSON answer that can always be sent: a client may have given us what we say back to it."""

    def render(self, content: Any) -> bytes:
        """Write the body."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
