"""Serve a model from Ray Serve: each replica is one server of ours, and Ray passes requests on to it.

    pip install 'ray[serve]' httpx
    python examples/ray/serve.py MODEL

Ray starts replicas, watches them by `/livez` and sends each request to one; streams pass through piece by piece.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
from starlette.requests import Request
from starlette.responses import StreamingResponse

from ray import serve

STORE = "piecework-store"


@serve.deployment(num_replicas=1, health_check_period_s=5, graceful_shutdown_timeout_s=60)
class Server:
    """One replica: a server in a process of its own, and a client that passes requests on."""

    def __init__(self, model: str, port: int = 8100) -> None:
        command = [sys.executable, "-m", "piecework.cli.main", "serve", model, "--port", str(port), "--store", STORE]
        self.process = subprocess.Popen(command)
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None)

    async def check_health(self) -> None:
        """Raise where the process should be replaced; a start under way is healthy."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with code {self.process.returncode}")
        (await self.client.get("/livez")).raise_for_status()

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on; what the server refuses while it starts comes with the time to come back."""
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        asked = self.client.build_request(
            request.method, request.url.path, content=await request.body(), headers=headers
        )
        answer = await self.client.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                await answer.aclose()  # a client of Ray's that goes away ends the request here too

        return StreamingResponse(body(), answer.status_code, dict(answer.headers))

    def __del__(self) -> None:
        """Have the server answer what is under way, and end."""
        self.process.terminate()


if __name__ == "__main__":
    serve.run(Server.bind(sys.argv[1]), route_prefix="/", blocking=True)
