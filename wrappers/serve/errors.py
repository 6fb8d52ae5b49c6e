"""What goes wrong with a request, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any, Final

_KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused, or fails.

    Args:
        status: of the response.
        message: one sentence: the rule, what was received, what to do.
        param: name of the field that it is about.
        code: a word for programs.
        headers: of the response, besides.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """The object that a response, or an event of a stream, consists of."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def undecodable(error: Exception) -> ApiError:
    """The end of a text whose tokenizer fails at it."""
    return ApiError(500, f"a text has ended because {error}", code="undecodable")
