"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """What a client gets in place of an answer.

    status: of HTTP. param: the field of the request that is wrong. code: a word that programs compare.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unsupported(name: str, fix: str) -> ApiError:
    """A field that this server does not take. fix: what to do instead."""
    return ApiError(400, f"{name} is not supported: {fix}", param=name, code="unsupported_parameter")
