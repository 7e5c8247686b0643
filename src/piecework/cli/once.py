"""Behind `serve --serve-once`: one answer, and what it compiled."""

from __future__ import annotations

import http.client
import json
import sys
from typing import TYPE_CHECKING

from piecework.errors import EngineError

if TYPE_CHECKING:
    from piecework.cli.serving import Startup


def answer_once(url: str, startup: Startup, prompt: str, api_keys: list[str] | None, as_json: bool) -> int:
    """Ask the server that runs for one answer, and list what that compiled."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=600)
    headers = {"Content-Type": "application/json"}
    if api_keys:
        headers["Authorization"] = f"Bearer {api_keys[0]}"
    body = json.dumps({"prompt": prompt, "max_tokens": 16, "temperature": 0})
    try:
        connection.request("POST", "/v1/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "error" in answer:
        raise EngineError(answer["error"]["message"], hint=answer["error"]["hint"])
    uncovered = startup.coverage.uncovered
    if as_json:
        from piecework.cli.output import print_json

        print_json(
            {
                "text": answer["choices"][0]["text"],
                "usage": answer["usage"],
                "specialisations": [found.as_dict() for found in startup.misses],
                "coverage": startup.coverage.ratio,
                "uncovered": {kind: shape.as_dict() for kind, shape in uncovered.items()},
            }
        )
        return 0
    print(answer["choices"][0]["text"])
    print(f"specialisations that this request caused: {len(startup.misses)}", file=sys.stderr)
    for found in startup.misses:
        print(f"  {found}", file=sys.stderr)
    print(f"shapes that the start had not run: {len(uncovered)}", file=sys.stderr)
    for kind in uncovered:
        print(f"  {kind}", file=sys.stderr)
    return 0
