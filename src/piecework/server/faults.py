"""What a request is refused with: OpenAI's error body, with the hint that all our errors carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecework.errors import OptionError, PieceworkError

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class Refusal(PieceworkError):
    """A request that is not served, with the status that says why.

    `param` names the field that is at fault, `code` is the word that a program may branch on, and `retry_after_s`
    says when to come back; 0 where coming back does not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, facts=facts)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to the status."""
        found = {}
        if self.retry_after_s:
            found["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return error_body(self.status, self.message, self.hint, param=self.param, code=self.code)


def error_body(
    status: int, message: str, hint: str = "", *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it, with our hint beside the message."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "hint": hint}}


def refused(error: PieceworkError) -> Refusal:
    """Return the refusal that an error of ours amounts to: the caller's fault where it is one, else the server's."""
    if isinstance(error, Refusal):
        return error
    status = 400 if isinstance(error, OptionError) else 500
    return Refusal(status, error.message, hint=error.hint, code=type(error).__name__, facts=error.facts)


def invalid_fields(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """Return the refusal of a body that does not fit its schema: the first fault in full, and how many there are."""
    first = errors[0] if errors else {"loc": (), "msg": "the body is not valid"}
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    said = str(first["msg"]).removeprefix("Value error, ")
    where = f"`{place}`: " if place and not place.isdigit() else ""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return Refusal(
        400,
        f"{where}{said}{more}",
        hint="`/openapi.json` has the schema of every request",
        param=place or None,
        code="invalid_body",
    )
