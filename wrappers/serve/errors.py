"""Errors of requests in the format that OpenAI's clients read."""

from __future__ import annotations

from typing import Any, Final

_KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused or has failed.

    Args:
        status: HTTP status of the response.
        message: one sentence with the rule, the value received and the remedy.
        param: name of the field with the error.
        code: identifier of the error for programs.
        headers: additional headers of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON object for the body of a response or for an event of a stream."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def undecodable(error: Exception) -> ApiError:
    """Return the error for a text that its tokenizer cannot decode."""
    return ApiError(500, f"generation has stopped: {error}", code="undecodable")
