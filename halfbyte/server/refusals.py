"""What a client is told instead of an answer: in OpenAI's shape or Anthropic's, and nothing of the inside."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from ..errors import HalfbyteError

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error",
    431: "invalid_request_error", 499: "cancelled", 500: "server_error", 503: "server_error",
}  # fmt: skip
ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
MESSAGES = "/v1/messages"  # Anthropic's, and what is below it
RETRY_SECONDS = 1


class Refused(HalfbyteError):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        kind = ANTHROPIC.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> JSONResponse:
        """In the shape that clients of this route know."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(RETRY_SECONDS)}}.get(self.status, {})
        if self.status == 503:
            headers = {"Retry-After": str(10 * RETRY_SECONDS)}
        if self.status in (408, 413, 431):
            headers = {"Connection": "close"}  # what is left of the request is not read
        return JSONResponse(self.anthropic if path.startswith(MESSAGES) else self.body, self.status, headers)


def queue_full() -> Refused:
    return Refused(429, "Too many requests are waiting. Try again soon.", code="queue_full")


def wrong(param: str, expected: str, code: str = "invalid_value") -> Refused:
    """A field that is not what it must be. What it is instead is not repeated: it may be long, or secret."""
    return Refused(400, f"{param}: {expected} was expected.", param, code)
