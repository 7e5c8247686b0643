"""The front's own state: what it serves, whom it lets in, and the checks that every route begins with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request

from piecework.engine.shapes import Coverage
from piecework.server.answers import ErrorAnswer
from piecework.server.faults import Refusal
from piecework.server.gate import Gate
from piecework.server.generation import ServedModel
from piecework.server.metrics import Metrics
from piecework.server.misses import Misses
from piecework.server.options import ServeOptions
from piecework.server.readiness import Readiness
from piecework.server.requests import Body
from piecework.server.template import ChatTemplate

IGNORED_HEADER = "X-Piecework-Ignored"
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "The body does not fit the schema, or asks for what is not served."),
        (401, "No valid API key."),
        (404, "No such model."),
        (408, "The body came too slowly."),
        (413, "The body is too long."),
        (429, "Too many answers are under way; `Retry-After` says when to come back."),
        (503, "No model is served now; `Retry-After` says when to come back."),
    )
}


class Front:
    """What the routes share. The model comes when its weights are in: until then each of them answers 503."""

    def __init__(
        self,
        options: ServeOptions,
        readiness: Readiness,
        metrics: Metrics,
        *,
        coverage: Coverage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.readiness = readiness
        self.metrics = metrics
        self.coverage = coverage or Coverage()
        self.misses = Misses(metrics)
        self.gate = Gate(options.max_requests, readiness, clock)
        self.created = int(time.time())
        self.template: ChatTemplate | None = None
        self._model: ServedModel | None = None

    @property
    def names(self) -> Sequence[str]:
        """The names that may stand in `model`; the first is what answers say."""
        return self.options.served_model_names or (self._model.root if self._model is not None else "",)

    @property
    def has_model(self) -> bool:
        return self._model is not None

    @property
    def model(self) -> ServedModel:
        """The model; raises Refusal while there is none to serve."""
        self.gate.check_ready()
        return self.loaded

    @property
    def loaded(self) -> ServedModel:
        """The model whose weights are in, whether it takes requests yet or not."""
        assert self._model is not None, "ready is said after the model came"
        return self._model

    def install(self, model: ServedModel, template: ChatTemplate | None) -> None:
        """Give the routes their model; readiness is told apart from this."""
        self._model, self.template = model, template
        self.metrics.follow(lambda: model.service.status)

    def check_model(self, name: str | None) -> None:
        """Raise Refusal where a request names a model that is not served."""
        if name is None or name in self.names:
            return
        listed = ", ".join(f"`{each}`" for each in self.names)
        raise Refusal(
            404,
            f"the model `{name[:200]}` does not exist here",
            hint=f"this server serves {listed}",
            param="model",
            code="model_not_found",
        )

    def headers(self, body: Body) -> dict[str, str]:
        """Return the headers that an answer to this body has besides its own."""
        ignored = [name for name in body.ignored() if name.isascii() and name.isprintable()]
        return {IGNORED_HEADER: ", ".join(ignored)[:1000]} if ignored else {}


def request_id(request: Request) -> str:
    """Return the id that the entrance gave the request."""
    return str(request.state.request_id)
